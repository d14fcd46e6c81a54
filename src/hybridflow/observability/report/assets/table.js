// A table of any length of which only the rows in sight are elements. Arrow keys move, Enter opens, headings sort.
"use strict";

const ROW_HEIGHT = 30, SPARE = 6;

// columns: [{name, title, value(row), text(row), wide, class(row)}]; open(row) is called on Enter and on a click.
class Table {
  constructor(label, columns, open) {
    Object.assign(this, { columns, open, rows: [], all: [], active: 0, sort: null, down: false });
    this.body = el("tbody");
    this.heads = columns.map((column) => el("th", { scope: "col", class: column.wide ? "wide" : null },
      el("button", { type: "button", title: column.hint ?? `sort by ${column.title}`, onclick: () => this.sortBy(column) }, column.title)));
    this.table = el("table", { class: "rows", "aria-label": label, "aria-rowcount": 1 }, el("thead", {}, el("tr", { "aria-rowindex": 1 }, this.heads)), this.body);
    this.node = el("div", { class: "table card", tabindex: 0, role: "group", "aria-label": `${label}: arrow keys move, Enter opens`,
      onscroll: () => this.draw(), onkeydown: (event) => this.key(event) }, this.table);
  }

  set(rows) {
    this.all = rows;
    this.order();
  }

  order() {
    const kept = this.rows[this.active];
    this.rows = this.sort ? sorted(this.all, this.sort.value, this.down) : this.all;
    this.active = Math.max(0, kept ? this.rows.indexOf(kept) : 0);
    this.columns.forEach((column, index) => {
      const way = column !== this.sort ? "none" : this.down ? "descending" : "ascending";
      this.heads[index].setAttribute("aria-sort", way);
    });
    this.table.setAttribute("aria-rowcount", this.rows.length + 1);
    this.draw();
  }

  sortBy(column) {
    this.down = this.sort === column ? !this.down : !column.wide; // numbers begin with the largest
    this.sort = column;
    this.node.scrollTop = 0;
    this.active = 0;
    this.rows = [];
    this.order();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.node.scrollTop / ROW_HEIGHT) - SPARE);
    const seen = Math.ceil((this.node.clientHeight || 600) / ROW_HEIGHT) + 2 * SPARE;
    const last = Math.min(this.rows.length, first + seen);
    const space = (count) => el("tr", { class: "space", "aria-hidden": "true" }, el("td", { colspan: this.columns.length, style: `height:${count * ROW_HEIGHT}px` }));
    const shown = this.rows.slice(first, last).map((row, index) => this.row(row, first + index));
    this.body.replaceChildren(space(first), ...shown, space(this.rows.length - last));
    this.node.classList.toggle("none", !this.rows.length);
  }

  row(row, index) {
    const cells = this.columns.map((column) => {
      const text = column.text ? column.text(row) : cell(column.value(row));
      return el("td", { class: [column.wide ? "wide" : "number", column.class?.(row) ?? ""].join(" "), title: column.wide ? text : null }, text);
    });
    return el("tr", { "aria-rowindex": index + 2, "aria-selected": String(index === this.active), onclick: () => { this.active = index; this.open(row); } }, cells);
  }

  key(event) {
    if (event.target !== this.node) return; // a heading has the focus
    const page = Math.max(1, Math.floor(this.node.clientHeight / ROW_HEIGHT) - 2);
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Enter" && this.rows[this.active]) this.open(this.rows[this.active]);
    else if (by) this.go(this.active + by);
    else return;
    event.preventDefault();
  }

  go(index) {
    this.active = Math.min(this.rows.length - 1, Math.max(0, index));
    const top = this.active * ROW_HEIGHT, height = this.node.clientHeight - 2 * ROW_HEIGHT;
    if (top < this.node.scrollTop) this.node.scrollTop = top;
    if (top > this.node.scrollTop + height) this.node.scrollTop = top - height;
    this.draw();
    const row = this.rows[this.active];
    if (row) say(this.columns.map((column) => `${column.title} ${column.text ? column.text(row) : cell(column.value(row))}`).join(", "));
  }
}

const cell = (value) => (value == null ? "" : Number.isInteger(value) ? String(value) : typeof value === "number" ? format(value) : String(value));

// Rows in the order of a value: numbers before texts, what has none always last; equal ones stay in their order.
function sorted(rows, value, down) {
  const sign = down ? -1 : 1;
  const keyed = rows.map((row) => [value(row), row]);
  keyed.sort(([one], [two]) => {
    if (one == null || two == null) return (one == null) - (two == null);
    if (typeof one !== typeof two) return typeof one === "number" ? -1 : 1;
    return one < two ? -sign : one > two ? sign : 0;
  });
  return keyed.map(([, row]) => row);
}

// Tell a screen reader something that is seen elsewhere.
function say(text) { document.getElementById("said").textContent = text; }
