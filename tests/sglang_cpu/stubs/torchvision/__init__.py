"""Stand-in for torchvision: imported by SGLang's image processors, unused by text serving."""

from __future__ import annotations

import enum

from standin import stand_in

__version__ = "0.28.0"


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


stand_in(
    __name__,
    submodules=("io", "ops", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"),
    special={
        f"{module}.InterpolationMode": InterpolationMode
        for module in (
            "torchvision.transforms",
            "torchvision.transforms.functional",
            "torchvision.transforms.v2",
            "torchvision.transforms.v2.functional",
        )
    },
)
