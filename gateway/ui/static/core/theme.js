/* A classic script in the head: the stored theme applies before the first paint. */
(() => {
  const stored = localStorage.getItem("headgate-theme");
  if (stored === "light" || stored === "dark") document.documentElement.dataset.theme = stored;
})();
