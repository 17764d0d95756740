/** Reads the answer of a chat completion, streamed or whole, into an answer object. */

/**
 * @typedef {Object} Answer
 * @property {string} content
 * @property {string} reasoning
 * @property {{id: string, name: string, arguments: string}[]} tool_calls
 * @property {?string} finish_reason
 * @property {?Object} usage
 * @property {?string} progress  the last progress comment, null after a chunk with a choice: "queued 3", "prefill 512/2048"
 * @property {?string} error
 */

/** @returns {Answer} */
export const emptyAnswer = () => ({
  content: "", reasoning: "", tool_calls: [], finish_reason: null, usage: null, progress: null, error: null,
});

function addMessage(answer, part) {
  answer.content += part.content || "";
  answer.reasoning += part.reasoning_content || part.reasoning || "";
  (part.tool_calls || []).forEach((call, position) => {
    const index = call.index === undefined ? position : call.index;
    const known = answer.tool_calls[index] || { id: "", name: "", arguments: "" };
    const { name = "", arguments: text = "" } = call.function || {};
    answer.tool_calls[index] = { id: call.id || known.id, name: known.name + name, arguments: known.arguments + text };
  });
}

/** Adds a chunk, or the body of an answer that was not streamed. */
export function addBody(answer, body) {
  if (body.error) answer.error = body.error.message || "The answer ended in an error.";
  const choice = (body.choices || [])[0];
  if (choice) {
    addMessage(answer, choice.delta || choice.message || {});
    answer.finish_reason = choice.finish_reason || answer.finish_reason;
    answer.progress = null;
  }
  answer.usage = body.usage || answer.usage;
}

/**
 * A reader of server-sent events that adds what it gets to `answer`.
 * @param {Answer} answer
 * @returns {function(string): void} takes text as it arrives
 */
export function streamReader(answer) {
  let rest = "";
  return (text) => {
    const lines = (rest + text).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith(": headgate ")) answer.progress = line.slice(11);
      if (line.startsWith("data:")) {
        const data = line.slice(5).trim();
        if (data && data !== "[DONE]") addBody(answer, JSON.parse(data));
      }
    }
  };
}
