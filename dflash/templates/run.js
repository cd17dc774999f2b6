// Index of the value of xs (ascending) that is nearest to x.
function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - xs[low - 1] <= xs[low] - x ? low - 1 : low;
}

const shown = (value) => Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3)
  ? value.toExponential(2) : String(Number(value.toPrecision(4)));

for (const chart of $$(".chart")) {
  const data = JSON.parse($("script", chart).textContent);
  const area = $(".area", chart), cursor = $(".cursor", chart), lead = data.series[0].x;
  let index = null;

  function show(at) {
    index = Math.max(0, Math.min(lead.length - 1, at));
    const x = lead[index];
    cursor.hidden = false;
    cursor.style.left = (x - data.range[0]) / (data.range[1] - data.range[0]) * 100 + "%";
    $("[data-at]", chart).textContent = "step " + x;
    data.series.forEach((series, number) => {
      const near = nearest(series.x, x);
      const value = $("[data-value='" + number + "']", chart);
      value.textContent = shown(series.y[near]) + (series.x[near] === x ? "" : " (step " + series.x[near] + ")");
    });
  }
  function leave() {
    index = null;
    cursor.hidden = true;
    for (const value of $$("[data-value], [data-at]", chart)) value.textContent = "";
  }
  area.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect(), share = (event.clientX - box.left) / box.width;
    show(nearest(lead, data.range[0] + share * (data.range[1] - data.range[0])));
  });
  area.addEventListener("pointerleave", leave);
  area.addEventListener("blur", leave);
  area.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (by === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    show(index === null ? (by > 0 ? 0 : lead.length - 1) : index + by);
  });
}

for (const figure of $$(".barred")) {
  const say = (event) => { if (event.target.matches(".bars i")) $(".said", figure).textContent = event.target.getAttribute("aria-label"); };
  for (const kind of ["pointerover", "focusin", "click"]) figure.addEventListener(kind, say);
}
