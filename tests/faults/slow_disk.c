/* Preloaded into a test's client: its writes at an offset (a store's shards, nothing else) become slow, or fail.

   EYAS_TEST_DISK names a file of two numbers, "<microseconds> <errno>", read at every write; no file, no fault. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>

typedef ssize_t (*pwrite_t)(int, const void *, size_t, off_t);

static ssize_t with_fault(const char *name, int fd, const void *data, size_t size, off_t offset) {
    const char *control = getenv("EYAS_TEST_DISK");
    FILE *file = control ? fopen(control, "r") : NULL;
    int delay_us = 0, number = 0;
    if (file) {
        if (fscanf(file, "%d %d", &delay_us, &number) < 1) delay_us = number = 0;
        fclose(file);
    }
    if (delay_us) usleep(delay_us);
    if (number) {
        errno = number;
        return -1;
    }
    return ((pwrite_t)dlsym(RTLD_NEXT, name))(fd, data, size, offset);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    return with_fault("pwrite", fd, data, size, offset);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) {
    return with_fault("pwrite64", fd, data, size, offset);
}
