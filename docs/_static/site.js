// Says above each table that is wider than the page that it scrolls, and lets keys scroll it.
function markTables() {
  for (const table of document.querySelectorAll(".content table.docutils")) {
    const scrolls = table.scrollWidth > table.clientWidth + 1;
    let hint = table.previousElementSibling;
    if (!hint?.classList.contains("scroll-hint")) {
      hint = document.createElement("p");
      hint.className = "scroll-hint";
      hint.textContent = "This table scrolls sideways →";
      table.before(hint);
    }
    hint.hidden = !scrolls;
    if (scrolls) table.tabIndex = 0;
    else table.removeAttribute("tabindex");
  }
}

document.addEventListener("DOMContentLoaded", markTables);
window.addEventListener("load", markTables);
window.addEventListener("resize", markTables);
