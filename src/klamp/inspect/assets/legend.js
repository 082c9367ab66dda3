// The names and colours of a panel's lines, and their values where the cursor is.
const klampLegend = (() => {
  "use strict";
  const COLOURS = 7; // --c0 … --c6 in the style

  const variable = (line) => `--c${line.colour % COLOURS}`;
  const secondRound = (line) => line.colour >= COLOURS; // the same colours again, dashed
  const create = (parent, name, properties) =>
    parent.appendChild(Object.assign(document.createElement(name), properties));

  // The value at the cursor, or the one before it: evaluations are not made at every step.
  function nearest(plot, series, index) {
    const values = plot.data[series];
    for (let i = index; i >= 0; i--) if (values[i] != null) return i;
    for (let i = index; i < values.length; i++) if (values[i] != null) return i;
    return index;
  }

  const glyph = (parent, line) =>
    create(parent, "i", { className: `stroke ${secondRound(line) ? "dashed" : line.style}` });

  // A button that hides a line; returns where its value goes.
  function entry(parent, line, name, toggle) {
    const title = [line.run, line.metric].filter(Boolean).join(" · ");
    const button = create(parent, "button", { type: "button", title, ariaPressed: "true" });
    button.style.setProperty("--c", `var(${variable(line)})`);
    glyph(button, line);
    if (name) create(button, "span", { textContent: name });
    else button.ariaLabel = title;
    button.addEventListener("click", () => { button.ariaPressed = String(toggle()); });
    return create(button, "output", {});
  }

  // One metric for all runs, or all metrics of one run: a name for each line.
  function names(list, panel, toggle) {
    const title = list.parentElement.querySelector("h4")?.textContent;
    return panel.lines.map((line, i) => {
      const name = line.run || (line.label === title ? "" : line.label);
      return entry(create(list, "li"), line, name, () => toggle(i));
    });
  }

  // Several metrics of several runs: a row for each run, a column for each metric.
  function table(list, panel, toggle) {
    const [runs, metrics] = ["run", "metric"].map((key) => [...new Set(panel.lines.map((line) => line[key]))]);
    list.classList.add("table");
    list.style.setProperty("--columns", metrics.length);
    const head = create(list, "li");
    create(head, "span");
    metrics.forEach((metric) => {
      const line = panel.lines.find((other) => other.metric === metric);
      const cell = create(head, "span", { title: metric });
      glyph(cell, { ...line, colour: 0 });
      cell.append(line.label);
    });
    const cells = new Map();
    runs.forEach((run) => {
      const row = create(list, "li");
      create(row, "span", { textContent: run, title: run });
      metrics.forEach((metric) => {
        const i = panel.lines.findIndex((line) => line.run === run && line.metric === metric);
        if (i < 0) create(row, "span");
        else cells.set(i, entry(row, panel.lines[i], "", () => toggle(i)));
      });
    });
    return panel.lines.map((_, i) => cells.get(i));
  }

  // Names, colours and values; returns what brings the values up to date.
  function legend(place, panel, plot) {
    const toggle = (i) => {
      const show = !plot().series[i + 1].show;
      plot().setSeries(i + 1, { show });
      return show;
    };
    const mixed = panel.lines[0].run && panel.lines.some((line) => line.metric !== panel.lines[0].metric);
    const outputs = (mixed ? table : names)(place.querySelector(".legend"), panel, toggle);
    const at = create(place, "p", { className: "at" });
    return (u) => {
      const here = u.cursor.idx;
      at.textContent = here == null ? "" : `step ${u.data[0][here].toLocaleString("en")}`;
      outputs.forEach((output, i) => {
        const index = nearest(u, i + 1, here ?? u.data[0].length - 1);
        output.textContent = klampWords.words(u.data[i + 1][index], panel.unit);
      });
    };
  }

  return { legend, nearest, create, variable, secondRound };
})();
