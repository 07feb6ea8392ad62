// Keys that go on, back and decide, and pages that look again by themselves. Nothing is fetched
// from anywhere but this page's own address.
"use strict";
const box = document.getElementById("keys");
if (box) {
  box.checked = localStorage.getItem("keys") !== "off";
  box.addEventListener("change", () => localStorage.setItem("keys", box.checked ? "on" : "off"));
}

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
  if (typing || !box || !box.checked || event.ctrlKey || event.metaKey || event.altKey) return;
  const aim = /^[a-z]$/.test(event.key) && document.querySelector(`[data-key=${event.key}]`);
  if (event.key === "j" || event.key === "k") step(event.key === "k");
  else if (!aim) return;
  else if (aim.tagName === "BUTTON") aim.click();
  else aim.select();
  event.preventDefault();
});

const every = Number(document.body.dataset.poll || 0);
let last = "";
async function again() {
  try {
    const answer = await fetch(location.href, { cache: "no-store" });
    if (!answer.headers.get("content-type").startsWith("text/html")) {
      document.querySelector("h1").textContent = "Done";
      document.querySelector("[role=status]").textContent = "The file is among your downloads.";
      document.querySelector(".moving").remove();
      location.reload();
      return;
    }
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const [main, own] = [page.querySelector("main"), document.querySelector("main")];
    if (main && main.innerHTML !== last) {
      last = main.innerHTML;
      own.replaceChildren(...main.childNodes);
    }
    document.title = page.title;
    if (page.body.dataset.poll) setTimeout(again, 1000 * every);
  } catch {
    setTimeout(again, 1000 * every); // the program has ended, or is busy
  }
}
if (every) setTimeout(again, 1000 * every);
