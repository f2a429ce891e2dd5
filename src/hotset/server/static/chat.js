// The chat box: a conversation kept in this tab, answered by `/v1/chat/completions` as a stream.

import { ask, events } from "./server.js";

const at = (id) => document.getElementById(id);

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

// One message on the page; `text` and `thought` may grow.
class Said {
  constructor(role, name) {
    this.root = element("article", `said ${role}`);
    this.root.append(element("p", "who", name));
    this.text = element("p", "text");
    this.root.append(this.text);
    this.thought = null;
  }

  write(text) {
    this.text.append(text);
  }

  think(text) {
    if (this.thought === null) {
      const details = element("details", "");
      details.append(element("summary", "", "Reasoning"));
      this.thought = details.appendChild(element("p", "text"));
      this.text.before(details);
    }
    this.thought.append(text);
  }

  end(note) {
    this.root.append(element("p", "note", note));
  }

  fail(reason) {
    this.root.append(element("p", "failed", reason));
  }
}

class Chat {
  constructor(model) {
    this.model = model;
    this.messages = [];
    this.stopping = null;
  }

  append(said) {
    at("empty").hidden = true;
    at("log").append(said.root);
    this.follow(true);
  }

  // Keeps the newest line in sight, unless the user has scrolled away from it.
  follow(always = false) {
    const log = at("log");
    if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 80) {
      log.scrollTop = log.scrollHeight;
    }
  }

  busy(is) {
    at("send").disabled = is;
    at("stop").disabled = !is;
    at("log").setAttribute("aria-busy", String(is));
  }

  clear() {
    this.stopping?.abort();
    this.messages = [];
    at("log").replaceChildren(at("empty"));
    at("empty").hidden = false;
  }

  async send(content) {
    const messages = this.messages;
    messages.push({ role: "user", content });
    const mine = new Said("user", "You");
    mine.write(content);
    this.append(mine);
    const said = new Said("assistant", this.model() ?? "model");
    this.append(said);
    this.stopping = new AbortController();
    this.busy(true);
    const answer = { content: "", start: performance.now(), first: null, last: null, tokens: null };
    let failed = false;
    try {
      await this.stream(messages, said, answer);
      said.end(summary(answer));
    } catch (error) {
      failed = error.name !== "AbortError";
      if (failed) said.fail(error instanceof TypeError ? "the server is not reachable" : error.message);
      else said.end("stopped");
    } finally {
      // What was said so far stays part of the conversation; a turn without an answer does not.
      if (answer.content) messages.push({ role: "assistant", content: answer.content });
      else messages.pop();
      this.stopping = null;
      this.busy(false);
      this.follow(failed);
    }
  }

  async stream(messages, said, answer) {
    const most = at("most").valueAsNumber;
    const response = await ask("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      signal: this.stopping.signal,
      body: JSON.stringify({
        model: this.model(),
        messages,
        stream: true,
        stream_options: { include_usage: true },
        ...(Number.isInteger(most) && most > 0 ? { max_tokens: most } : {}),
      }),
    });
    if (!response.ok) throw new Error(await reason(response));
    for await (const data of events(response)) {
      if (data.error) throw new Error(data.error.message);
      if (data.usage) answer.tokens = data.usage.completion_tokens;
      const delta = data.choices?.[0]?.delta ?? {};
      if (!delta.content && !delta.reasoning_content) continue;
      answer.last = performance.now();
      answer.first ??= answer.last;
      if (delta.reasoning_content) said.think(delta.reasoning_content);
      if (delta.content) {
        answer.content += delta.content;
        said.write(delta.content);
      }
      this.follow();
    }
  }
}

async function reason(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `the server answered ${response.status}`;
}

function summary({ start, first, last, tokens }) {
  if (first === null || tokens === null) return "empty answer";
  const seconds = (last - first) / 1000;
  const rate = tokens > 1 && seconds > 0 ? `, ${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
  return `${tokens} tokens${rate}, first after ${((first - start) / 1000).toFixed(2)} s`;
}

export function startChat({ model }) {
  const chat = new Chat(model);
  const message = at("message");
  at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const content = message.value.trim();
    if (!content || chat.stopping !== null) return;
    message.value = "";
    chat.send(content);
  });
  message.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      at("ask").requestSubmit();
    }
  });
  at("stop").addEventListener("click", () => chat.stopping?.abort());
  at("new").addEventListener("click", () => chat.clear());
}
