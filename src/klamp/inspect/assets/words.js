// Numbers as a reader takes them in.
const klampWords = (() => {
  "use strict";

  function words(value, unit) {
    if (value == null) return "–";
    if (unit === "percent") return `${Number((100 * value).toPrecision(3))} %`;
    const size = Math.abs(value);
    const short = Number(value.toPrecision(4));
    if (size >= 1e7 || (size > 0 && size < 1e-3)) {
      return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
    }
    const text = size >= 1000 ? Math.round(value).toLocaleString("en") : String(short);
    return unit === "seconds" ? `${text} s` : text;
  }

  // As many decimals as it takes to tell a tick from the next.
  function ticks(unit) {
    const factor = unit === "percent" ? 100 : 1;
    const suffix = { percent: " %", seconds: " s", number: "" }[unit];
    return (plot, values, axis, space, step) => {
      const exact = (value) => Number((value * factor).toPrecision(12));
      const decimals = Math.max(0, Math.ceil(-Math.log10(exact(step)) - 1e-9), (String(exact(step)).split(".")[1] ?? "").length);
      const largest = Math.max(...values.map((value) => Math.abs(exact(value))));
      return values.map((value) => {
        if (largest >= 1e7 || largest < 1e-3) {
          return (value ? exact(value).toExponential().replace("e+", "e") : "0") + suffix;
        }
        return exact(value).toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals }) + suffix;
      });
    };
  }

  return { words, ticks };
})();
