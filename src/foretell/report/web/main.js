// The page: its sections put in place, and what happens to all of them.
const theme = document.getElementById("theme");
theme.addEventListener("change", () => {
  if (theme.value) document.documentElement.dataset.theme = theme.value;
  else delete document.documentElement.dataset.theme;
  redrawers.forEach(f => f());
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redrawers.forEach(f => f()));
addEventListener("beforeprint", () => {
  printing = true;
  document.querySelectorAll("details").forEach(d => {
    d.open = true;
  });
  redrawers.forEach(f => f());
  if (window.foretellView) foretellView.paint();
});
addEventListener("afterprint", () => {
  printing = false;
  redrawers.forEach(f => f());
});
unpacked(document.getElementById("packed").textContent).then(
  D => {
    document.getElementById("main").replaceChildren(...head(D), ...sectionsOf(D));
    document.documentElement.dataset.ready = "yes";
  },
  error => {
    document.getElementById("loading").textContent =
      "This browser cannot unpack the report (" + error.message + "). Browsers of 2023 and later can.";
  },
);
