/** The blocks of one device in the memory map, as a pure function of its record. */

/** Parts of a model on a device, in the order in which they are drawn. */
export const PARTS = ["weights", "kv", "compute", "other", "reserved", "warm"];
export const PART_NAMES = {
  weights: "weights", kv: "KV cache", compute: "compute", other: "other", reserved: "reserved", warm: "warm",
};
export const ACCOUNTS = {
  releasing: "releasing (ended workers)", cached: "stored sequences", foreign: "other programs",
};
const COLORS = 8;

/** @param {string} id @returns {number} a color of the palette, always the same for a model */
export function colorOf(id) {
  let hash = 0;
  for (const letter of id) hash = (hash * 31 + letter.codePointAt(0)) % 65521;
  return hash % COLORS;
}

/** Resident bytes that no buffer explains (the device context, growth) count as other. */
function partsOf(holding, warm) {
  const parts = Object.fromEntries(PARTS.map((part) => [part, holding[part] || 0]));
  const known = parts.weights + parts.kv + parts.compute + parts.other;
  parts.other += Math.max(0, (holding.resident || 0) - known);
  if (!warm) return parts;
  const resident = Math.max(warm, known);
  return { weights: 0, kv: 0, compute: 0, other: 0, reserved: parts.reserved, warm: resident };
}

const sum = (parts) => Object.values(parts).reduce((total, value) => total + value, 0);

/**
 * @param {import("./types.js").Device} device
 * @returns {{models: {id: string, parts: Object<string, number>, bytes: number}[],
 *   accounts: {id: string, bytes: number}[], free: number, scale: number}}  `scale`: bytes of the whole bar
 */
export function blocksOf(device) {
  const warm = device.warm || {};
  const ids = [...new Set([...Object.keys(device.by_model || {}), ...Object.keys(warm)])];
  const models = ids
    .map((id) => {
      const parts = partsOf((device.by_model || {})[id] || {}, warm[id]);
      return { id, parts, bytes: sum(parts) };
    })
    .filter((model) => model.bytes > 0)
    .sort((a, b) => b.bytes - a.bytes || (a.id < b.id ? -1 : 1));
  const accounts = Object.keys(ACCOUNTS)
    .map((id) => ({ id, bytes: (device.accounts || {})[id] || 0 }))
    .filter(({ bytes }) => bytes > 0);
  const taken = sum(models.map(({ bytes }) => bytes)) + sum(accounts.map(({ bytes }) => bytes));
  const scale = Math.max(device.total_bytes || 0, taken, 1);
  return { models, accounts, free: scale - taken, scale };
}
