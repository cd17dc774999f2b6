"use strict";
const $ = (what, inside) => (inside || document).querySelector(what);
const $$ = (what, inside) => [...(inside || document).querySelectorAll(what)];

// Theme: the system's until somebody chooses. Storage may be forbidden for a file: then per visit.
const theme = {
  stored() { try { return localStorage.getItem("theme"); } catch { return null; } },
  store(name) { try { localStorage.setItem("theme", name); } catch { /* not kept */ } },
  system: matchMedia("(prefers-color-scheme: dark)"),
  show(name) {
    document.documentElement.dataset.theme = name;
    for (const button of $$("[data-do=theme]")) {
      button.textContent = name === "dark" ? "Light" : "Dark";
      button.setAttribute("aria-label", "Switch to the " + (name === "dark" ? "light" : "dark") + " theme");
    }
  },
  toggle() {
    const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    theme.store(name);
    theme.show(name);
  },
  start() {
    const follow = () => theme.show(theme.stored() || (theme.system.matches ? "dark" : "light"));
    theme.system.addEventListener("change", follow);
    follow();
  },
};

async function copy(button) {
  const text = $(button.dataset.from).textContent.trim();
  let done = false;
  try {
    await navigator.clipboard.writeText(text);
    done = true;
  } catch {
    const area = document.createElement("textarea"); // where the clipboard is not to be had
    area.value = text;
    button.after(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.textContent = done ? "Copied" : "Select it by hand";
  setTimeout(() => { button.textContent = "Copy"; }, 1600);
}

const help = {
  open() { if (!$("#help").open) $("#help").showModal(); },
};

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-do]");
  if (!button) return;
  const does = { theme: theme.toggle, copy: () => copy(button), help: help.open,
    close: () => button.closest("dialog").close() }[button.dataset.do];
  if (does) does();
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || typing(event) || $("dialog[open]")) return;
  if (event.key === "?") { event.preventDefault(); help.open(); }
  if (event.key === "t") theme.toggle();
});
const typing = (event) => event.target.closest("input, textarea, select") !== null;
theme.start();
