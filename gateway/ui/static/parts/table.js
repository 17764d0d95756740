/**
 * A table with a caption, keyed rows, and columns that sort it. On a narrow screen each row becomes a block, so the
 * roles are explicit: with another `display` an element loses its role.
 */

import { NONE, missing } from "../core/format.js";
import { html, useState } from "../vendor/preact-htm.js";
import { memo } from "./memo.js";
import { Empty } from "./status.js";

/**
 * @typedef {Object} Column
 * @property {string} key
 * @property {string} label
 * @property {string} [hint]  a longer name, as title of the header
 * @property {boolean} [numeric]
 * @property {string} [style]  a class of its cells
 * @property {function(any, any): any} cell  its content, from the row and the context of the table
 * @property {function(any): ?number|string} [sort]  the value to sort by; rows without one come last
 */

const cellClass = (column, more = "") => `${column.numeric ? "num " : ""}${column.style || ""}${more}`.trim() || undefined;

/** A cell without a value is left out on a narrow screen. */
function cellOf(column, row, context) {
  const content = column.cell(row, context);
  const blank = content === NONE ? " blank" : "";
  return html`<td role="cell" class=${cellClass(column, blank)} data-label=${column.label}>${content}</td>`;
}

const Row = memo(({ row, columns, context, tone }) => html`<tr role="row" class=${tone}>
  ${columns.map((column, index) => index === 0
    ? html`<th role="rowheader" scope="row" class=${cellClass(column)}>${column.cell(row, context)}</th>`
    : cellOf(column, row, context))}
</tr>`);

function Header({ column, order, onSort }) {
  const sorted = order.key === column.key ? (order.down ? "descending" : "ascending") : undefined;
  const label = column.sort
    ? html`<button type="button" class="sort" onClick=${() => onSort(column.key)}>${column.label}<span
        aria-hidden="true">${sorted ? (order.down ? " ↓" : " ↑") : ""}</span></button>`
    : column.label;
  return html`<th role="columnheader" scope="col" class=${cellClass(column)} aria-sort=${sorted}
    title=${column.hint}>${label}</th>`;
}

function compare(a, b) {
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  return a < b ? -1 : a > b ? 1 : 0;
}

function ordered(rows, columns, order) {
  const column = columns.find(({ key }) => key === order.key);
  if (!column) return rows;
  const sign = order.down ? -1 : 1;
  return rows
    .map((row) => [column.sort(row), row])
    .sort(([a], [b]) => (missing(a) || missing(b) ? compare(a, b) : sign * compare(a, b)))
    .map(([, row]) => row);
}

/**
 * @param {Object} props
 * @param {string} props.caption
 * @param {Column[]} props.columns  the same array at each render
 * @param {any[]} props.rows
 * @param {function(any): string|number} props.id
 * @param {any} [props.context]  for the cells, the same object at each render
 * @param {any} [props.empty]  shown without rows
 * @param {function(any): string} [props.tone]  a class of the row
 * @param {boolean} [props.hideCaption]  the heading above is its visible caption
 * @param {string} [props.name]  a class of the table
 */
export function Table({ caption, columns, rows, id, context, empty, tone, hideCaption, name }) {
  const [order, setOrder] = useState({ key: null, down: false });
  const onSort = (key) => setOrder((old) => ({ key, down: old.key === key && !old.down }));
  if (!rows.length) return html`<${Empty}>${empty}<//>`;
  return html`<div class="scroll" role="group" aria-label=${caption} tabindex="0">
    <table role="table" class=${`data ${name || ""}`}>
      <caption class=${hideCaption ? "unseen" : undefined}>${caption}</caption>
      <thead role="rowgroup"><tr role="row">
        ${columns.map((column) => html`<${Header} key=${column.key} column=${column} order=${order} onSort=${onSort} />`)}
      </tr></thead>
      <tbody role="rowgroup">
        ${ordered(rows, columns, order).map((row) => html`<${Row} key=${id(row)} row=${row} columns=${columns}
          context=${context} tone=${tone ? tone(row) : undefined} />`)}
      </tbody>
    </table>
  </div>`;
}
