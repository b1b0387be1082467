// Elements of the page.

const element = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
};
const svgElement = (tag, attributes = {}, ...children) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
};
const byId = (id) => document.getElementById(id);
const count = (number) => number.toLocaleString("en");
// A name in which lines may break after "_" and ".".
const breakable = (name) => name.split(/(?<=[_.])/).flatMap((part, index) => (index ? [element("wbr"), part] : [part]));
