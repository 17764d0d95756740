/** The view in the address: `#/models`, `#/requests/ID`. */

/** @returns {string[]} the decoded parts of the address, at least one */
export function route() {
  const parts = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean);
  return parts.length ? parts.map(decode) : ["overview"];
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** @param {...string} parts @returns {string} an address for links */
export const address = (...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;
