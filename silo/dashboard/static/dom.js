// A small virtual tree. Text from the silo becomes text nodes and attribute values only, so it is never parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "rect", "path", "line", "text", "circle", "title", "polyline", "polygon"]);

/** Describe an element. Attributes that begin with "on" are handlers; null and false leave an attribute out. */
export function h(tag, attributes, ...children) {
  const { key = null, ...rest } = attributes ?? {};
  return { tag, attributes: rest, key, children: children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false) };
}

/** Make the children of an element equal to a list of descriptions. Elements that stay keep their focus. */
export function render(parent, ...descriptions) {
  const wanted = descriptions.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false);
  const keyed = new Map();
  const free = [];
  for (const node of parent.childNodes) {
    if (node.key !== null && node.key !== undefined) keyed.set(node.key, node);
    else free.push(node);
  }
  let next = parent.firstChild;
  for (const one of wanted) {
    let node = one.key !== null && one.key !== undefined ? keyed.get(one.key) : free.find((other) => fits(other, one));
    if (node !== undefined && !fits(node, one)) node = undefined;
    if (node === undefined) node = make(one);
    else if (node.key !== null && node.key !== undefined) keyed.delete(node.key);
    else free.splice(free.indexOf(node), 1);
    update(node, one);
    if (node === next) next = next.nextSibling;
    else parent.insertBefore(node, next);
  }
  for (const node of [...keyed.values(), ...free]) node.remove();
}

function fits(node, one) {
  if (typeof one !== "object") return node.nodeType === Node.TEXT_NODE;
  return node.nodeType === Node.ELEMENT_NODE && node.localName === one.tag;
}

function make(one) {
  if (typeof one !== "object") return document.createTextNode("");
  const inSvg = SVG_TAGS.has(one.tag);
  const node = inSvg ? document.createElementNS(SVG, one.tag) : document.createElement(one.tag);
  node.key = one.key;
  node.given = {};
  return node;
}

function update(node, one) {
  if (typeof one !== "object") {
    if (node.data !== String(one)) node.data = String(one);
    return;
  }
  const before = node.given ?? {};
  for (const name of Object.keys(before)) if (!(name in one.attributes)) set(node, name, null);
  for (const [name, value] of Object.entries(one.attributes)) if (before[name] !== value) set(node, name, value);
  node.given = one.attributes;
  if (one.attributes.own !== true) render(node, one.children);
}

function set(node, name, value) {
  if (name === "own") return; // its children are managed elsewhere
  if (name.startsWith("on")) node[name] = value;
  else if (name === "shift") node.style.transform = value === null ? "" : value;
  else if (name === "wide") node.style.width = value === null ? "" : value;
  else if (name === "value" || name === "checked" || name === "disabled") node[name] = value ?? false;
  else if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else node.setAttribute(name, value === true ? "" : String(value));
}
