// Making elements. Text only ever becomes text: nothing on these pages reads a string as HTML, and the browser is told to refuse it.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element: properties by name (`class`, `data-*` and `aria-*` as attributes), then children, text or elements. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made && name !== "list") made[name] = value;
    else made.setAttribute(name === "className" ? "class" : name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== ""));
  return made;
}

/** An SVG element. */
export function drawn(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Set the text of an element where it changes: a page that does not move is easier to read, and to select from. */
export function say(target, text) {
  if (target.textContent !== text) target.textContent = text;
}
