/** Requests of the page to the gateway. Addresses are relative to the page, `/ui/`. */

/** A refused or failed request; `message` is the gateway's. `status` is 0 when the gateway does not answer. */
export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

const UNREACHABLE = "The gateway does not answer. Check that it runs (`headgate up`), then try again.";
let csrf = "";

/** @param {string} token  the CSRF token of the session */
export function useToken(token) {
  csrf = token;
}

/**
 * Sends a request. Throws ApiError for an error status and without an answer, and AbortError after `signal`.
 * @param {string} method
 * @param {string} path  relative to the page
 * @param {any} [body]  sent as JSON
 * @param {AbortSignal} [signal]
 * @returns {Promise<Response>}
 */
export async function request(method, path, body, signal) {
  const headers = {};
  if (method !== "GET") headers["x-csrf-token"] = csrf;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method, headers, signal, credentials: "same-origin", cache: "no-store",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, UNREACHABLE, "unreachable");
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  const error = answer.error || {};
  const failure = new ApiError(response.status, error.message || `The gateway answered ${response.status}.`, error.code);
  failure.headers = response.headers;
  throw failure;
}

/** As `request`, but returns the JSON of the answer; null without any. */
export async function call(method, path, body, signal) {
  const response = await request(method, path, body, signal);
  return response.status === 204 ? null : response.json().catch(() => null);
}

/** A name as a part of a path; its slashes stay. */
const id = (name) => name.split("/").map(encodeURIComponent).join("/");

export const session = {
  read: () => call("GET", "session"),
  open: (key) => call("POST", "session", { key }),
  close: () => call("DELETE", "session"),
};

/** @param {{model: string, action: string, device?: string, node?: string}} wanted */
export const plan = (wanted, signal) => call("POST", "api/plan", wanted, signal);
export const act = ({ model, action, ...where }) => call("POST", `api/models/${id(model)}/${action}`, where);
export const resetBreaker = (name) => call("POST", `api/breakers/${id(name)}/reset`, {});
export const recoverDevice = (device) => call("POST", `api/devices/${id(device.id)}/recover`, { node: device.node });
export const explain = (request_id) => call("GET", `api/requests/${id(request_id)}`);
export const keys = () => call("GET", "api/keys");
export const usage = (by) => call("GET", `api/usage?by=${by}`);
export const routes = () => call("GET", "v1/models");
