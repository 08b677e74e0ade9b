// What stays in the browser: one entry for each conversation, so that two tabs do not write over each other, and settings.

const CHAT = "flint-chat-";
const SETTINGS = "flint-settings";

function newChat() {
  return { id: crypto.randomUUID?.() ?? String(Date.now()) + Math.random(), title: "", changed: Date.now(), messages: [] };
}

function isChat(value) {
  return value && typeof value.id === "string" && Array.isArray(value.messages) &&
    value.messages.every((message) => typeof message?.role === "string" && typeof message.content === "string");
}

// All conversations, the newest first. A browser that keeps nothing has none.
function storedChats() {
  const found = [];
  try {
    for (let i = 0; i < localStorage.length; i += 1) {
      const name = localStorage.key(i);
      if (!name.startsWith(CHAT)) continue;
      try {
        const chat = JSON.parse(localStorage.getItem(name));
        if (isChat(chat)) found.push(chat);
      } catch { /* not of this page */ }
    }
  } catch { /* storage is switched off */ }
  return found.sort((a, b) => b.changed - a.changed);
}

// Whether it was kept; not when the browser's space is used up or storage is switched off.
function storeChat(chat) {
  const text = JSON.stringify({ id: chat.id, title: chat.title, changed: chat.changed, messages: chat.messages });
  try {
    localStorage.setItem(CHAT + chat.id, text);
    return true;
  } catch {
    return false;
  }
}

function dropChat(id) {
  try {
    localStorage.removeItem(CHAT + id);
  } catch { /* storage is switched off */ }
}

const KEPT = ["system", "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "tools"];

function storeSettings() {
  const values = { think: get("think").checked };
  for (const name of KEPT) values[name] = get(name).value;
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(values));
    sessionStorage.setItem("flint-key", get("key").value);
  } catch { /* storage is switched off */ }
}

function restoreSettings() {
  try {
    const values = JSON.parse(localStorage.getItem(SETTINGS) ?? "{}");
    for (const name of KEPT) get(name).value = values[name] ?? "";
    get("think").checked = values.think ?? true;
    get("key").value = sessionStorage.getItem("flint-key") ?? "";
  } catch { /* storage is switched off, or not of this page */ }
}
