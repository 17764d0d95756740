/** The server's clock, and texts on the page that change every second without a render. */

let offset = 0;
/** @type {Map<HTMLElement, function(number): string>} */
const texts = new Map();

/** @param {number} seconds  the server's clock less the browser's */
export function setOffset(seconds) {
  offset = seconds;
}

/** @returns {number} Unix seconds by the server's clock */
export const now = () => Date.now() / 1000 + offset;

function write(element, text) {
  const value = text(now());
  if (element.textContent !== value) element.textContent = value;
}

/**
 * Keeps the text of an element current.
 * @param {HTMLElement} element
 * @param {function(number): string} text
 */
export function keep(element, text) {
  texts.set(element, text);
  write(element, text);
}

/** @param {HTMLElement} element */
export function forget(element) {
  texts.delete(element);
}

setInterval(() => {
  if (document.visibilityState === "visible") texts.forEach((text, element) => write(element, text));
}, 1000);
