// What the pages of all servers do alike.
"use strict";
// What jobs say of themselves only ever becomes text, never markup: there is no innerHTML here.
const $ = (id) => document.getElementById(id);

function el(name, attributes, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  node.append(...children.map((child) => child instanceof Node ? child : String(child)));
  return node;
}
function svg(name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
// A click begins and ends on one element: links that are the same as before stay.
function showLinks(node, links) {
  links.forEach((link, n) => {
    const old = node.childNodes[n];
    if (!old) node.append(link);
    else if (!old.isEqualNode(link)) old.replaceWith(link);
  });
  while (node.childNodes.length > links.length) node.lastChild.remove();
}
const known = (value) => value !== null && value !== undefined;
const digits = (value, n) => Number(value.toPrecision(n)).toLocaleString("en", {maximumFractionDigits: 6});
function percent(value, sign) {
  if (!known(value)) return "–";
  const size = Math.abs(value), text = (size * 100).toFixed(size < 0.001 && size > 1e-6 ? 3 : 1) + " %";
  return (value < 0 ? "−" : sign && value > 0 ? "+" : "") + text;
}
const current = () => decodeURIComponent(location.hash.slice(1));

function tile(name, value, more) {
  return el("div", {}, el("small", {}, name), el("b", {}, value), el("small", {}, more || " "));
}
// Each row: its class, and its cells; of each column the heading, and whether it is flush left.
function table(node, heads, rows) {
  const head = el("tr", {}, ...heads.map(([text, left]) => el("th", left ? {class: "l"} : {}, text)));
  const body = rows.map(([kind, ...cells]) => el("tr", kind ? {class: kind} : {}, ...cells.map((cell, n) =>
    cell instanceof HTMLTableCellElement ? cell : el("td", heads[n][1] ? {class: "l"} : {}, cell))));
  node.replaceChildren(el("thead", {}, head), el("tbody", {}, ...body));
}
async function polling() {
  for (;;) {
    if (!document.hidden) await poll();
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

// What a server answers; an Error with its sentence and status where it refuses.
async function answered(path, options) {
  const response = await fetch(path, options);
  const answer = await response.json();
  if (!response.ok) {
    const error = new Error(typeof answer.detail === "string" ? answer.detail : response.statusText);
    error.status = response.status;
    throw error;
  }
  return answer;
}

// Round numbers for an axis.
function steps(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => power * factor >= rough * (1 - 1e-9));
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high * (1 + 1e-12); n += 1) found.push(n * step);
  return found;
}
