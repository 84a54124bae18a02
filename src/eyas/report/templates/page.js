(function () {
  "use strict";
  var root = document.documentElement, button = document.getElementById("theme");
  var prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  button.hidden = false;
  button.addEventListener("click", function () {
    var now = root.dataset.theme || (prefersDark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
  });
  // Paper has no summary to click on.
  window.addEventListener("beforeprint", function () {
    document.querySelectorAll("details").forEach(function (one) { one.open = true; });
  });
})();
