// Draws the panels of the report, and redraws them as the window, the theme or paper asks for it.
(() => {
  "use strict";
  const { words, ticks } = klampWords;
  const { legend, nearest, create, variable, secondRound } = klampLegend;
  const root = document.documentElement;
  const data = JSON.parse(document.getElementById("data").textContent);
  const FEW = 12; // points that are marked one by one
  const ON_PAPER = { small: 200, wide: 660, other: 315 }; // pixels of width
  // Every panel spans the same steps, so that they can be read one below the other.
  const ends = data.steps.flatMap((steps) => [steps[0], steps[steps.length - 1]]);
  const span = [Math.min(0, ...ends), Math.max(1, ...ends)];

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  // What goes wrong is put where a reader, and a test, can see it.
  const failed = (error) => {
    root.dataset.error = [root.dataset.error, error].filter(Boolean).join("; ");
  };
  addEventListener("error", (event) => failed(event.message));
  addEventListener("unhandledrejection", (event) => failed(event.reason));

  function series(line, panel) {
    const marks = line.style.endsWith("marks");
    const dashed = line.style === "dashed" || line.style.startsWith("hollow") || secondRound(line);
    const faint = line.style === "line" && panel.lines.some((other) => other.style.endsWith("marks"));
    const stroke = () => colour(variable(line));
    const filled = line.style.startsWith("hollow") ? () => colour("--card") : stroke;
    const few = line.y.filter((y) => y != null).length <= FEW;
    return {
      stroke,
      width: faint || line.style === "dashed" ? 1.25 : 1.75,
      alpha: faint ? 0.75 : 1,
      dash: dashed ? [5, 4] : undefined,
      points: { show: marks || few, size: marks ? 7 : 5, width: 1.75, stroke, fill: filled },
    };
  }

  function axes(panel, log) {
    const shared = {
      stroke: () => colour("--axis"),
      grid: { stroke: () => colour("--rule"), width: 1 },
      ticks: { show: false },
      font: "11px system-ui, sans-serif",
    };
    const size = (plot, labels) => 12 + 6.2 * Math.max(3, ...(labels ?? []).map((label) => label.length));
    const steps = (plot, values) => values.map((x, i) => (i ? x.toLocaleString("en") : `step ${x.toLocaleString("en")}`));
    const whole = [0, 1, 2, 3, 4, 5, 6, 7].flatMap((n) => [1, 2, 5].map((k) => k * 10 ** n));
    const named = log ? (plot, values) => values.map((y) => (y == null ? "" : words(y, panel.unit))) : ticks(panel.unit);
    return [
      { ...shared, size: 26, gap: 8, space: 58, incrs: whole, values: steps, grid: { show: false } },
      { ...shared, size, gap: 6, space: 34, values: named },
    ];
  }

  // Room above and below; a line that is flat but for rounding gets enough of it to look flat.
  function range(panel) {
    return (plot, low, high) => {
      if (low == null) return [0, 1];
      const [bottom, top] = panel.zero ? [Math.min(0, low), Math.max(0, high)] : [low, high];
      const size = Math.max(Math.abs(bottom), Math.abs(top));
      const room = 0.08 * (top - bottom > 1e-4 * size ? top - bottom : size || 1);
      return [panel.zero && bottom === 0 ? 0 : bottom - room, panel.zero && top === 0 ? 0 : top + room];
    };
  }

  // Whether a logarithmic scale is possible, and shows more.
  function manyMagnitudes(panel) {
    const values = panel.lines.flatMap((line) => line.y.filter((y) => y != null));
    const [low, high] = values.reduce(([a, b], y) => [Math.min(a, y), Math.max(b, y)], [Infinity, 0]);
    return panel.unit !== "percent" && low > 0 && high > 10 * low;
  }

  // How many points lie inside the axes, for whoever wants to know whether anything can be seen.
  function visible(plot) {
    const { left, top, width, height } = plot.bbox;
    const inside = (x, y) => x >= left - 1 && x <= left + width + 1 && y >= top - 1 && y <= top + height + 1;
    let points = 0;
    for (let s = 1; s < plot.data.length; s++) {
      if (!plot.series[s].show) continue;
      plot.data[s].forEach((y, i) => {
        if (y != null && inside(plot.valToPos(plot.data[0][i], "x", true), plot.valToPos(y, "y", true))) points++;
      });
    }
    return points;
  }

  function draw(place, panel) {
    const frame = place.querySelector(".plot");
    const aligned = uPlot.join([[span], ...panel.lines.map((line) => [data.steps[line.x], line.y])]);
    let plot;
    const update = legend(place, panel, () => plot);
    const count = (u) => { place.dataset.points = visible(u); };
    const make = (log) => {
      const shown = panel.lines.map((_, i) => ({ show: plot?.series[i + 1].show ?? true }));
      plot?.destroy();
      const options = {
        width: frame.clientWidth || 320,
        height: frame.clientHeight || 124,
        padding: [8, 8 + 3.2 * span[1].toLocaleString("en").length, 0, 0], // half of the last step's label
        legend: { show: false },
        scales: { x: { time: false }, y: log ? { distr: 3 } : { range: range(panel) } },
        axes: axes(panel, log),
        series: [{}, ...panel.lines.map((line, i) => ({ ...series(line, panel), ...shown[i] }))],
        cursor: {
          y: false,
          dataIdx: nearest,
          points: { size: 6, width: 0, fill: (u, i) => colour(variable(panel.lines[i - 1])) },
          sync: { key: "klamp", setSeries: false, scales: ["x", null] },
        },
        hooks: { ready: [update], setCursor: [update], draw: [count] },
      };
      plot = new uPlot(options, aligned, frame);
    };
    make(false);
    if (manyMagnitudes(panel)) logButton(place, make);
    const fit = (width) => width > 0 && plot.setSize({ width, height: frame.clientHeight });
    const restore = () => fit(frame.clientWidth);
    new ResizeObserver(restore).observe(frame);
    return { place, fit, restore, plot: () => plot };
  }

  function logButton(place, make) {
    const item = create(place.querySelector(".legend"), "li", { className: "log" });
    const button = create(item, "button", { type: "button", textContent: "log", title: "Logarithmic scale", ariaPressed: "false" });
    button.addEventListener("click", () => {
      const log = button.ariaPressed === "false";
      button.ariaPressed = String(log);
      make(log);
    });
  }

  const charts = [];
  for (const place of document.querySelectorAll("[data-panel]")) {
    try {
      charts.push(draw(place, data.panels[Number(place.dataset.panel)]));
    } catch (error) {
      failed(error);
      console.error(error);
      const frame = place.querySelector(".plot");
      frame.textContent = frame.getAttribute("aria-label");
    }
  }
  window.klampCharts = charts;
  root.dataset.charts = charts.length;

  const redraw = () => charts.forEach((chart) => chart.plot().redraw(false));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  // Paper is white, and as wide as it is.
  addEventListener("beforeprint", () => {
    root.classList.add("printing");
    charts.forEach(({ place, fit }) => {
      fit(ON_PAPER[place.matches(".small") ? "small" : place.closest(".wide") ? "wide" : "other"]);
    });
    redraw();
  });
  addEventListener("afterprint", () => {
    root.classList.remove("printing");
    charts.forEach((chart) => chart.restore());
    redraw();
  });
})();
