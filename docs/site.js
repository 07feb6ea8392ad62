// What a keyboard or a screen reader needs and the theme leaves out: names for the search and for
// the buttons of each block of code, and a way to scroll wide tables and blocks by keys.

function nameAndReach() {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  document.querySelectorAll(".md-code__nav").forEach((buttons, number) =>
    buttons.setAttribute("aria-label", `Code block ${number + 1}`)
  );
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, pre > code")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
}

document$.subscribe(() => {
  nameAndReach();
  // The theme wraps tables and adds buttons after the page is there.
  new MutationObserver(nameAndReach).observe(document.body, { childList: true, subtree: true });
});
addEventListener("resize", nameAndReach);
