const rows = $$("#cases tbody tr");
const body = $("#cases tbody");
const filter = $("#filter");
let here = null;
let filterNext = false; // the table is on its way, and is to be filtered

// -- the table ---------------------------------------------------------------------------------

const seen = () => $$("tr", body).filter((row) => !row.hidden);

function refilter() {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  const kinds = $$("button[data-kind][aria-pressed=true]").map((button) => button.dataset.kind);
  const unmet = $("button[data-unmet]").getAttribute("aria-pressed") === "true";
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !(words.every((word) => text.includes(word))
      && (!kinds.length || kinds.includes(row.dataset.kind))
      && (!unmet || row.dataset.status !== "as expected"));
  }
  const left = seen().length;
  $("#count").textContent = left === rows.length ? left + " cases" : left + " of " + rows.length + " cases";
  $("#nothing").hidden = left > 0;
  if (here && here.hidden) mark(null);
}

function press(button) {
  button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
  refilter();
}

function sort(button) {
  const header = button.closest("th");
  const down = header.getAttribute("aria-sort") === "ascending";
  for (const other of $$("#cases th")) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", down ? "descending" : "ascending");
  const column = Number(button.dataset.sort);
  const cell = (row) => row.cells[column].textContent.trim();
  const order = "number" in button.dataset
    ? (a, b) => parseFloat(cell(a)) - parseFloat(cell(b))
    : (a, b) => cell(a).localeCompare(cell(b), "en", { numeric: true });
  body.append(...[...rows].sort((a, b) => (down ? -order(a, b) : order(a, b))));
}

function mark(row) {
  if (here) here.classList.remove("here");
  here = row;
  if (!row) return;
  row.classList.add("here");
  if (!document.body.classList.contains("open")) {
    $("a", row).focus({ preventScroll: true });
    row.scrollIntoView({ block: "nearest" });
  }
}

function move(by) {
  const list = seen();
  if (!list.length) return;
  const at = list.indexOf(here);
  mark(list[at < 0 ? (by > 0 ? 0 : list.length - 1) : Math.min(list.length - 1, Math.max(0, at + by))]);
  if (document.body.classList.contains("open")) location.hash = here.dataset.id;
}

// -- table or case: the address says which ------------------------------------------------------

const current = () => $("section.case.shown");

function route() {
  const wanted = location.hash.length > 1 ? document.getElementById(location.hash.slice(1)) : null;
  const section = wanted && wanted.matches("section.case") ? wanted : null;
  const before = current();
  if (before) before.classList.remove("shown");
  document.body.classList.toggle("open", section !== null);
  if (section) {
    section.classList.add("shown");
    mark(rows.find((row) => row.dataset.id === section.id));
    scrollTo(0, 0);
    section.focus({ preventScroll: true });
    const timeline = $(".timeline", section);
    if (timeline) axis(timeline);
  } else if (filterNext) {
    filter.focus();
  } else if (here) {
    mark(here);
  }
  filterNext = false;
}

const toList = () => { location.hash = ""; };

// -- the timeline -------------------------------------------------------------------------------

const zoomOf = (timeline) => Number(timeline.dataset.zoom || 1);

function zoom(timeline, factor, atSeconds) {
  const tracks = $(".tracks", timeline), canvas = $(".canvas", timeline);
  const begin = Number(timeline.dataset.begin), seconds = Number(timeline.dataset.seconds);
  const share = atSeconds === undefined
    ? (tracks.scrollLeft + tracks.clientWidth / 2) / canvas.clientWidth : (atSeconds - begin) / seconds;
  const value = Math.min(2000, Math.max(1, factor));
  timeline.dataset.zoom = value;
  canvas.style.setProperty("--zoom", value);
  axis(timeline);
  tracks.scrollLeft = share * canvas.clientWidth - tracks.clientWidth / 2;
  axis(timeline);
}

const zooms = {
  in: (timeline) => zoom(timeline, zoomOf(timeline) * 2),
  out: (timeline) => zoom(timeline, zoomOf(timeline) / 2),
  fit: (timeline) => zoom(timeline, 1),
  // 60 ms around the moment: calls and traces of that size are told apart there.
  moment: (timeline) => { if (timeline.dataset.moment) zoom(timeline, Math.max(8, Number(timeline.dataset.seconds) / 0.06), Number(timeline.dataset.moment)); },
};

function axis(timeline) {
  const tracks = $(".tracks", timeline), canvas = $(".canvas", timeline), line = $(".axis", timeline);
  const begin = Number(timeline.dataset.begin), seconds = Number(timeline.dataset.seconds);
  const width = canvas.clientWidth;
  if (!width) return;
  const rough = seconds * 90 / width, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((n) => n * power >= rough);
  const gridAt = (pixels) => (begin + pixels / width * seconds) / step;
  const first = Math.max(Math.ceil(begin / step), Math.floor(gridAt(tracks.scrollLeft)) - 1);
  const last = Math.ceil(gridAt(tracks.scrollLeft + tracks.clientWidth)) + 1;
  line.replaceChildren();
  for (let n = first; n <= last && n * step <= begin + seconds - step / 2; n++) {
    const tick = document.createElement("span");
    tick.style.left = ((n * step - begin) / seconds * 100) + "%";
    const at = n * step, digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    tick.textContent = seconds >= 1 ? at.toFixed(digits) + " s" : (at * 1000).toFixed(Math.max(0, digits - 3)) + " ms";
    line.append(tick);
  }
}

function say(rect) {
  for (const other of $$("rect.at")) other.classList.remove("at");
  rect.classList.add("at");
  $(".said", rect.closest(".timeline")).textContent = $("title", rect).textContent;
}

// -- events -------------------------------------------------------------------------------------

filter.addEventListener("input", refilter);
filter.addEventListener("keydown", (event) => {
  if (event.key === "Escape") { filter.value = ""; refilter(); filter.blur(); }
  if (event.key === "Enter" || event.key === "ArrowDown") { event.preventDefault(); filter.blur(); mark(null); move(1); }
});
document.addEventListener("pointerover", (event) => { if (event.target.matches("svg.lane rect")) say(event.target); });
document.addEventListener("click", (event) => {
  const target = event.target;
  const button = target.closest("button");
  if (target.matches("svg.lane rect")) say(target);
  else if (button && button.dataset.go) move(button.dataset.go === "on" ? 1 : -1);
  else if (button && button.dataset.zoom) zooms[button.dataset.zoom](button.closest(".timeline"));
  else if (button && "sort" in button.dataset) sort(button);
  else if (button && ("kind" in button.dataset || "unmet" in button.dataset)) press(button);
  else if (target.closest("#cases tbody tr") && !target.closest("a")) location.hash = target.closest("tr").dataset.id;
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || typing(event) || $("dialog[open]")) return;
  const section = current(), timeline = section && $(".timeline", section);
  const inTracks = event.target.closest(".tracks");
  const does = {
    j: () => move(1), k: () => move(-1), "/": () => { if (section) { filterNext = true; toList(); } else filter.focus(); },
    u: () => { if (!section) press($("button[data-unmet]")); },
    Escape: () => { if (section) toList(); },
    c: () => { const button = section && $("[data-do=copy]", section); if (button) button.click(); },
    "+": () => timeline && zooms.in(timeline), "-": () => timeline && zooms.out(timeline),
    "0": () => timeline && zooms.fit(timeline), f: () => timeline && zooms.moment(timeline),
  };
  if (!section) { does.ArrowDown = does.j; does.ArrowUp = does.k; }
  else if (!inTracks) { does.ArrowRight = does.j; does.ArrowLeft = does.k; }
  if (does[event.key]) { event.preventDefault(); does[event.key](); }
});
for (const tracks of $$(".tracks")) {
  tracks.addEventListener("scroll", () => axis(tracks.closest(".timeline")), { passive: true });
}
addEventListener("resize", () => { const section = current(); if (section && $(".timeline", section)) axis($(".timeline", section)); });
addEventListener("hashchange", route);
route();
