// Elements, number formats, ticks and line charts drawn as SVG. Text is always set as text, never parsed as HTML.
"use strict";

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") node.className = value;
    else if (key === "style") node.style.cssText = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child != null) node.append(child);
  return node;
}

function svg(tag, attributes = {}, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text != null) node.textContent = text;
  return node;
}

// ---------------------------------------------------------------- numbers

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

// A value with about four digits that count; used in legends and tooltips.
function format(value) {
  if (!isNumber(value)) return value == null ? "–" : String(value);
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e9) return (value / 1e9).toPrecision(4) + "G";
  if (size >= 1e6) return (value / 1e6).toPrecision(4) + "M";
  if (size >= 1e5) return (value / 1e3).toPrecision(4) + "k";
  if (size < 1e-3) return value.toExponential(2).replace("e-", "e−").replace(/^-/, "−");
  return (Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)))).replace(/^-/, "−");
}

function duration(seconds) {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds), two = (number) => String(number).padStart(2, "0");
  return whole < 3600 ? `${Math.floor(whole / 60)} min ${two(whole % 60)} s` : `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
}

// Ticks at 1, 2 or 5 times a power of ten inside [low, high].
function niceTicks(low, high, count, whole = false) {
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw * 0.999);
  if (whole) step = Math.max(1, Math.round(step));
  const ticks = [];
  for (let index = Math.ceil(low / step - 1e-9); index <= high / step + 1e-9; index++) ticks.push(index * step);
  return { ticks, step };
}

function tickText(value, step) {
  const size = Math.abs(value);
  if (size < step * 1e-6) return "0";
  const scale = size >= 1e6 || step >= 1e6 ? [1e6, "M"] : size >= 1e4 || step >= 1e4 ? [1e3, "k"] : [1, ""];
  if (step < 1e-4) return value.toExponential(Math.max(0, Math.floor(Math.log10(size)) - Math.floor(Math.log10(step)))).replace("e-", "e−").replace(/^-/, "−");
  const digits = Math.max(0, -Math.floor(Math.log10(step / scale[0]) + 1e-9));
  return (value / scale[0]).toFixed(digits).replace(/^-/, "−") + scale[1];
}

const superscript = (number) => String(number).replace(/[-\d]/g, (letter) => (letter === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[letter]));

// The y axis: {low, high, place(value) in 0..1, ticks: [{value, text}]}.
function yAxis(values, wantLog) {
  let low = Math.min(...values), high = Math.max(...values);
  if (wantLog && low > 0 && high / low > 20) {
    const first = Math.floor(Math.log10(low)), last = Math.max(first + 1, Math.ceil(Math.log10(high)));
    const stride = Math.ceil((last - first) / 5);
    const ticks = [];
    for (let power = first; power <= last; power += stride) ticks.push({ value: 10 ** power, text: "10" + superscript(power) });
    return { ticks, place: (value) => (Math.log10(value) - first) / (last - first), hasZero: false };
  }
  if (low === high) { const pad = Math.abs(low) * 0.1 || 1; low -= pad; high += pad; }
  else {
    const pad = (high - low) * 0.06;
    const nearZero = low >= 0 && low < high * 0.35;
    low = nearZero ? 0 : low - pad;
    high += pad;
  }
  const { ticks, step } = niceTicks(low, high, 5);
  return { ticks: ticks.map((value) => ({ value, text: tickText(value, step) })), place: (value) => (value - low) / (high - low), hasZero: low < 0 && high > 0 };
}

// Exponential smoothing with the start-up bias divided out; gaps and non-finite values pass through.
function smooth(values, weight) {
  if (!weight) return values;
  let mean = 0, mass = 0;
  return values.map((value) => {
    if (!isNumber(value)) return value;
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

// ---------------------------------------------------------------- tooltip

const tooltip = {
  node: null,
  show(event, head, rows) {
    this.node ??= document.getElementById("tooltip");
    this.node.replaceChildren(el("div", { class: "head" }, head), ...rows.map(([name, value, color]) =>
      el("div", { class: "row" }, el("span", {}, color ? el("span", { class: "swatch", style: `background:${color}` }) : null, name), el("b", {}, value))));
    this.node.hidden = false;
    const box = this.node.getBoundingClientRect();
    const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - box.width - 16 : event.clientX + 16;
    const top = Math.min(event.clientY + 14, innerHeight - box.height - 6);
    this.node.style.left = `${Math.max(4, left)}px`;
    this.node.style.top = `${Math.max(4, top)}px`;
  },
  hide() { if (this.node) this.node.hidden = true; },
};

// ---------------------------------------------------------------- charts

const CHART_HEIGHT = 208, FEW = 30; // below FEW points each one gets a dot
const measure = (() => {
  const context = document.createElement("canvas").getContext("2d");
  return (text) => { context.font = "11px system-ui, sans-serif"; return context.measureText(text).width; };
})();

// series: [{name, label, values, color}], values as long as `steps`: a number, null (not measured) or a string (not finite).
function drawChart(host, steps, series, { log = false, smoothing = 0 } = {}) {
  const width = Math.max(240, host.clientWidth), height = CHART_HEIGHT;
  // a handful of points (validations) is shown as measured: smoothing would only make it late
  const lines = series.map((one) => ({ ...one, shown: one.values.filter(isNumber).length > FEW ? smooth(one.values, smoothing) : one.values }));
  const finite = lines.flatMap((line) => line.values.filter(isNumber));
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": series.map((one) => one.name).join(", ") });
  host.replaceChildren(root);
  if (!finite.length) { root.append(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "no finite values")); return; }

  const axis = yAxis(finite, log);
  const left = 10 + Math.max(...axis.ticks.map((tick) => measure(tick.text))), right = width - 12, top = 10, bottom = height - 32;
  const firstStep = steps[0], lastStep = steps[steps.length - 1], span = lastStep - firstStep || 1;
  const x = (step) => (lastStep === firstStep ? (left + right) / 2 : left + ((step - firstStep) / span) * (right - left));
  const y = (value) => bottom - axis.place(value) * (bottom - top);

  for (const { value, text } of axis.ticks) {
    root.append(svg("line", { class: "gridline", x1: left, x2: right, y1: y(value), y2: y(value) }));
    root.append(svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, text));
  }
  if (axis.hasZero) root.append(svg("line", { class: "zero", x1: left, x2: right, y1: y(0), y2: y(0) }));
  root.append(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
  const xTicks = lastStep === firstStep ? { ticks: [firstStep], step: 1 } : niceTicks(firstStep, lastStep, Math.max(2, Math.floor((right - left) / 70)), true);
  for (const tick of xTicks.ticks) {
    root.append(svg("line", { class: "axis", x1: x(tick), x2: x(tick), y1: bottom, y2: bottom + 4 }));
    root.append(svg("text", { x: x(tick), y: bottom + 16, "text-anchor": "middle" }, tickText(tick, xTicks.step)));
  }
  root.append(svg("text", { x: (left + right) / 2, y: height - 3, "text-anchor": "middle" }, "step"));

  for (const line of lines) {
    if (line.shown !== line.values) root.append(svg("path", { d: path(line.values, steps, x, y), fill: "none", stroke: line.color, "stroke-opacity": 0.22, "stroke-width": 1.2 }));
    root.append(svg("path", { d: path(line.shown, steps, x, y), fill: "none", stroke: line.color, "stroke-width": 1.8, "stroke-linejoin": "round", "stroke-linecap": "round" }));
    const count = line.values.filter(isNumber).length;
    line.shown.forEach((value, index) => {
      if (isNumber(value) && count <= FEW) root.append(svg("circle", { cx: x(steps[index]), cy: y(value), r: count > 15 ? 2 : 2.8, fill: line.color }));
      if (typeof value === "string") root.append(svg("path", { class: "broken", d: `M${x(steps[index]) - 4} ${top - 8}h8l-4 7z` }));
    });
  }
  attachHover(root, steps, lines, x, y, { left, right, top, bottom, width });
}

// Joins over steps where the metric was not measured; breaks where it was not finite.
function path(values, steps, x, y) {
  let text = "", pen = "M";
  values.forEach((value, index) => {
    if (isNumber(value)) { text += `${pen}${x(steps[index]).toFixed(1)} ${y(value).toFixed(1)}`; pen = "L"; }
    else if (typeof value === "string") pen = "M";
  });
  return text;
}

function attachHover(root, steps, lines, x, y, box) {
  const cross = svg("line", { class: "cross", y1: box.top, y2: box.bottom, visibility: "hidden" });
  const dots = lines.map((line) => svg("circle", { r: 3.6, fill: line.color, stroke: "var(--card)", "stroke-width": 1.5, visibility: "hidden" }));
  root.append(cross, ...dots);
  const measured = steps.map((_, index) => index).filter((index) => lines.some((line) => line.values[index] != null));
  const hide = () => { tooltip.hide(); for (const node of [cross, ...dots]) node.setAttribute("visibility", "hidden"); };
  root.addEventListener("pointermove", (event) => {
    const rect = root.getBoundingClientRect(), at = ((event.clientX - rect.left) / rect.width) * box.width;
    const index = measured.reduce((best, candidate) => (Math.abs(x(steps[candidate]) - at) < Math.abs(x(steps[best]) - at) ? candidate : best), measured[0]);
    const place = x(steps[index]);
    cross.setAttribute("x1", place); cross.setAttribute("x2", place); cross.setAttribute("visibility", "visible");
    lines.forEach((line, number) => {
      const value = line.shown[index];
      dots[number].setAttribute("visibility", isNumber(value) ? "visible" : "hidden");
      if (isNumber(value)) { dots[number].setAttribute("cx", place); dots[number].setAttribute("cy", y(value)); }
    });
    tooltip.show(event, `step ${steps[index]}`, lines.filter((line) => line.values[index] != null).map((line) => [line.label, format(line.values[index]), line.color]));
  });
  root.addEventListener("pointerleave", hide);
}
