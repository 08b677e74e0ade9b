// One reply: asked for, read as it comes, shown, and put into the history of its own conversation, whichever is on view.

function headers() {
  const all = { "content-type": "application/json" };
  if (get("key").value) all.authorization = "Bearer " + get("key").value;
  return all;
}

// The tools of the settings. Throws what is wrong with them, in words.
function tools() {
  const text = get("tools").value.trim();
  if (!text) return undefined;
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error("Tools are no JSON: " + error.message);
  }
  if (!Array.isArray(value)) throw new Error("Tools must be a JSON array, as in the API: [{...}]");
  return value;
}

// What the model gets to see of a conversation: no reply without words. Failed messages are gone by now.
function history(messages) {
  const sent = [];
  for (const { role, content, reasoning_content, tool_calls, tool_call_id } of messages) {
    if (role === "assistant" && !content && !tool_calls) continue;
    const message = { role, content };
    if (reasoning_content) message.reasoning_content = reasoning_content;
    if (tool_calls) message.tool_calls = tool_calls;
    if (tool_call_id) message.tool_call_id = tool_call_id;
    sent.push(message);
  }
  return sent;
}

function requestBody(messages) {
  const body = { messages: history(messages), stream: true, return_progress: true };
  body.stream_options = { include_usage: true, continuous_usage_stats: true };
  const system = get("system").value.trim();
  if (system) body.messages.unshift({ role: "system", content: system });
  for (const name of ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"]) {
    if (get(name).value !== "") body[name] = Number(get(name).value);
  }
  if (!get("think").checked) body.chat_template_kwargs = { enable_thinking: false };
  const offered = tools();
  if (offered?.length) body.tools = offered;
  return body;
}

// The data of each server-sent event, parsed. Throws when the stream ends before its end.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the connection ended before the reply did");
    const found = (rest + value).split("\n\n");
    rest = found.pop();
    for (const block of found) {
      if (block === "data: [DONE]") return;
      if (block.startsWith("data: ")) yield JSON.parse(block.slice(6));
    }
  }
}

class Reply {
  constructor(chat) {
    this.chat = chat;
    this.message = { role: "assistant", content: "" };
    this.calls = [];
    this.abort = new AbortController();
    this.began = performance.now();
    this.element = make("section", "turn assistant");
    this.element.setAttribute("aria-label", "Reply");
    this.element.setAttribute("aria-busy", "true");
    this.waiting = make("div", "wait", "Waiting for the server …");
    this.element.append(this.waiting);
  }
  async run(body) {
    try {
      const options = { method: "POST", headers: headers(), body: JSON.stringify(body), signal: this.abort.signal };
      const response = await fetch(base + "/v1/chat/completions", options).catch((error) => {
        if (error.name === "AbortError") throw error;
        throw new Error("The server does not answer. The message is kept: try again when it is back.");
      });
      if (!response.ok) {
        const answer = await response.json().catch(() => ({}));
        throw new Error(answer.error?.message ?? "The server answered with HTTP " + response.status + ".");
      }
      for await (const event of events(response)) this.take(event);
      return this.end();
    } catch (error) {
      return this.end(this.abort.signal.aborted ? "stopped" : "failed", error.message);
    }
  }
  take(event) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) this.usage = event.usage;
    if (event.prompt_progress) this.progress(event.prompt_progress);
    for (const choice of event.choices) {
      if (choice.finish_reason) this.reason = choice.finish_reason;
      const { content, tool_calls } = choice.delta;
      const thought = choice.delta.reasoning ?? choice.delta.reasoning_content;
      if (!thought && !content && !tool_calls?.length) continue;
      this.last = performance.now();
      if (!this.first) {
        this.first = this.last;
        this.atFirst = event.usage?.completion_tokens ?? 0;
      }
      if (thought) this.message.reasoning_content = (this.message.reasoning_content ?? "") + thought;
      if (content) this.message.content += content;
      for (const part of tool_calls ?? []) this.call(part);
      if ((content || tool_calls?.length) && this.message.reasoning_content) {
        this.message.thought_s ??= (this.last - this.first) / 1000;
      }
    }
    this.drawn ??= setTimeout(() => this.draw(), 40);
  }
  call({ index, id, type, function: called }) {
    const known = this.calls[index];
    if (known) known.function.arguments += called?.arguments ?? "";
    else this.calls[index] = { id, type, function: { name: called?.name ?? "", arguments: called?.arguments ?? "" } };
  }
  progress({ total, processed }) {
    if (this.first) return;
    const bar = make("progress");
    bar.max = total;
    bar.value = processed;
    const text = "Reading the prompt: " + number(processed) + " of " + number(total) + " tokens";
    bar.setAttribute("aria-label", text);
    this.waiting.replaceChildren(text, bar);
    follow();
  }
  // Shows what came since; parts stay where they are.
  draw() {
    this.drawn = undefined;
    const { message } = this;
    if (this.first) this.waiting.remove();
    if (message.reasoning_content) {
      this.thought ??= thoughtFold(this.element);
      grow(this.thought.text, message.reasoning_content);
      const over = message.content || this.calls.length || !this.element.hasAttribute("aria-busy");
      this.thought.label.textContent = over ? thoughtLabel(message) : "Thinking";
    }
    if (message.content) {
      if (!this.text) this.element.append((this.text = new Markdown()).element);
      this.text.show(message.content);
    }
    this.boxes ??= [];
    this.calls.forEach((call, i) => {
      if (!this.boxes[i]) this.element.append((this.boxes[i] = callBox(call)).element);
      grow(this.boxes[i].text, call.function.arguments);
    });
    follow();
  }
  // Puts what was said into the conversation. reason: "stopped" or "failed" for a reply that did not come to its end.
  end(reason, problem) {
    if (this.ended) return reason;
    this.ended = true;
    clearTimeout(this.drawn);
    const { chat, message } = this;
    const calls = this.calls.filter(Boolean);
    // A call that was not finished is none: nobody should answer half a call.
    if (calls.length && !reason) message.tool_calls = calls;
    if (calls.length && reason) message.lost = calls.map((call) => call.function.name).join(", ");
    if (message.reasoning_content) message.thought_s ??= (this.last - this.first) / 1000;
    message.note = this.note(reason);
    const said = message.content || message.reasoning_content || message.tool_calls || message.lost;
    if (reason === "failed") {
      if (said) message.problem = problem;
      else if (chat.messages.length) chat.messages.at(-1).failed = problem;
    } else if (!said) {
      message.note = message.note || "nothing";
    }
    if (said || reason !== "failed") chat.messages.push(message);
    chat.reply = undefined;
    return reason;
  }
  // Counts are the server's. Speed is that of tokens after the first arrival, and none where all came at once.
  note(reason) {
    const parts = [];
    const { usage } = this;
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
      parts.push(number(usage.prompt_tokens) + " prompt tokens" + (cached ? " (" + number(cached) + " cached)" : ""));
      parts.push(number(usage.completion_tokens) + " tokens");
      const seconds = (this.last - this.first) / 1000;
      const after = usage.completion_tokens - this.atFirst;
      if (this.atFirst && after > 0 && seconds >= 0.1) parts.push((after / seconds).toFixed(1) + " tokens/s");
    }
    if (this.first) parts.push("first after " + ((this.first - this.began) / 1000).toFixed(2) + " s");
    if (this.reason === "length") parts.push("cut: the limit of tokens is reached");
    if (reason) parts.push(reason);
    return parts.join(" · ");
  }
}
