// Keyboard shortcuts, and pages that refresh themselves. Nothing is fetched from anywhere but the
// page's own address.
"use strict";
const shortcuts = document.getElementById("keys");
if (shortcuts) {
  shortcuts.checked = localStorage.getItem("keys") !== "off";
  shortcuts.addEventListener("change", () => {
    localStorage.setItem("keys", shortcuts.checked ? "on" : "off");
  });
}

// Go to the next mention of a note, or to the next row of a list; or back.
function step(back) {
  const link = document.querySelector(back ? "a[rel=prev]" : "a[rel=next]");
  const rows = [...document.querySelectorAll(".rows a")];
  const at = rows.indexOf(document.activeElement) + (back ? -1 : 1);
  if (rows[at]) rows[at].focus();
  else if (link) link.click();
}

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input:not([type=checkbox]), textarea, select");
  if (event.key === "Escape" && typing) typing.blur();
  if (typing || !shortcuts || !shortcuts.checked) return;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const target = /^[a-z]$/.test(event.key) && document.querySelector(`[data-key=${event.key}]`);
  if (event.key === "j" || event.key === "k") step(event.key === "k");
  else if (!target) return;
  else if (target.tagName === "BUTTON") target.click();
  else target.select();
  event.preventDefault();
});

// A table that is too wide scrolls by itself; people who use a keyboard must reach it.
function reachWideTables() {
  document.querySelectorAll(".wide").forEach((box, place) => {
    if (box.scrollWidth <= box.clientWidth) return;
    box.tabIndex = 0;
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", `Table ${place + 1}, scrolls sideways`);
  });
}
reachWideTables();
window.addEventListener("resize", reachWideTables);

// What a person has opened, ticked or focused, by a name that the next version has too.
function nameOf(element) {
  if (element.tagName === "DETAILS") return element.querySelector("summary").textContent;
  return [element.tagName, element.id, element.name, element.value, element.href].join(" ");
}

function keepState(main) {
  const open = new Map([...main.querySelectorAll("details")].map((d) => [nameOf(d), d.open]));
  const boxes = main.querySelectorAll("input[type=checkbox]");
  const ticked = new Map([...boxes].map((box) => [nameOf(box), box.checked]));
  const focused = main.contains(document.activeElement) && nameOf(document.activeElement);
  return () => {
    for (const each of main.querySelectorAll("details")) {
      if (open.has(nameOf(each))) each.open = open.get(nameOf(each));
    }
    for (const each of main.querySelectorAll("input[type=checkbox]")) {
      if (ticked.has(nameOf(each))) each.checked = ticked.get(nameOf(each));
    }
    const places = main.querySelectorAll("a, button, input, select, summary, [tabindex]");
    const place = focused && [...places].find((each) => nameOf(each) === focused);
    if (place) place.focus({ preventScroll: true });
  };
}

const seconds = Number(document.body.dataset.poll || 0);
let shown = "";

// Replace the content of the page by its newest version.
async function refresh() {
  try {
    const answer = await fetch(location.href, { cache: "no-store" });
    if (!answer.headers.get("content-type").startsWith("text/html")) {
      document.querySelector("h1").textContent = "Done";
      document.querySelector("[role=status]").textContent = "The file has been downloaded.";
      document.querySelector(".moving").remove();
      location.reload();
      return;
    }
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const main = page.querySelector("main");
    if (main && main.innerHTML !== shown) {
      shown = main.innerHTML;
      const restore = keepState(document.querySelector("main"));
      for (const part of ["main", "nav"]) {
        document.querySelector(part).replaceChildren(...page.querySelector(part).childNodes);
      }
      restore();
      reachWideTables();
    }
    document.title = page.title;
    if (page.body.dataset.poll) setTimeout(refresh, 1000 * seconds);
  } catch {
    setTimeout(refresh, 1000 * seconds); // the server has ended, or is busy
  }
}
if (seconds) setTimeout(refresh, 1000 * seconds);
