// Requests to this server, with the key that the user gave, and the reading of event streams.

const KEY = "key";

export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

export function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  return fetch(path, { ...options, headers });
}

// The JSON of each event, in order, until `[DONE]` or the end.
// https://html.spec.whatwg.org/multipage/server-sent-events.html: events end with an empty line,
// lines that begin with a colon are comments.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const lines = part.split("\n").filter((line) => line.startsWith("data:"));
      const data = lines.map((line) => line.slice(5).trimStart()).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}
