// Messages of the bus (docs/wire.md): msgpack, or an lz4 frame of it. Binary values stay views; arrays are decoded on use.
const text = new TextDecoder();

export function decode(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  let at = 0;
  const take = (count) => { const from = at; at += count; return from; };
  const string = (size) => text.decode(bytes.subarray(take(size), at));
  const binary = (size) => bytes.subarray(take(size), at);
  const list = (size) => Array.from({ length: size }, value);
  const map = (size) => {
    const out = {};
    for (let i = 0; i < size; i++) { const key = value(); out[key] = value(); }
    return out;
  };
  const extension = (size) => { at += 1; return binary(size); };
  const u8 = () => view.getUint8(take(1)), u16 = () => view.getUint16(take(2)), u32 = () => view.getUint32(take(4));
  function value() {
    const tag = u8();
    if (tag < 0x80) return tag;
    if (tag < 0x90) return map(tag & 15);
    if (tag < 0xa0) return list(tag & 15);
    if (tag < 0xc0) return string(tag & 31);
    if (tag >= 0xe0) return tag - 256;
    switch (tag) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: return binary(u8());
      case 0xc5: return binary(u16());
      case 0xc6: return binary(u32());
      case 0xc7: return extension(u8());
      case 0xc8: return extension(u16());
      case 0xc9: return extension(u32());
      case 0xca: return view.getFloat32(take(4));
      case 0xcb: return view.getFloat64(take(8));
      case 0xcc: return u8();
      case 0xcd: return u16();
      case 0xce: return u32();
      case 0xcf: return Number(view.getBigUint64(take(8)));
      case 0xd0: return view.getInt8(take(1));
      case 0xd1: return view.getInt16(take(2));
      case 0xd2: return view.getInt32(take(4));
      case 0xd3: return Number(view.getBigInt64(take(8)));
      case 0xd9: return string(u8());
      case 0xda: return string(u16());
      case 0xdb: return string(u32());
      case 0xdc: return list(u16());
      case 0xdd: return list(u32());
      case 0xde: return map(u16());
      case 0xdf: return map(u32());
      default:
        if (tag >= 0xd4 && tag <= 0xd8) return extension(1 << (tag - 0xd4));
        throw new Error(`not msgpack: byte ${tag}`);
    }
  }
  const out = value();
  if (at !== bytes.length) throw new Error("bytes after the message");
  return out;
}

export function lz4(frame) {
  const view = new DataView(frame.buffer, frame.byteOffset, frame.byteLength);
  if (view.getUint32(0, true) !== 0x184d2204) throw new Error("not an lz4 frame");
  const flags = frame[4];
  let at = 6 + (flags & 8 ? 8 : 0) + (flags & 1 ? 4 : 0) + 1;
  let out = new Uint8Array(Math.max(frame.length * 4, 1 << 16)), end = 0;
  const room = (count) => {
    if (end + count <= out.length) return;
    const larger = new Uint8Array(Math.max(out.length * 2, end + count));
    larger.set(out.subarray(0, end));
    out = larger;
  };
  for (;;) {
    const size = view.getUint32(at, true), length = size & 0x7fffffff;
    at += 4;
    if (!size) break;
    const stop = at + length;
    if (size >>> 31) { room(length); out.set(frame.subarray(at, stop), end); end += length; at = stop; }
    while (at < stop) {
      const token = frame[at++];
      let literals = token >> 4;
      if (literals === 15) { let more; do literals += more = frame[at++]; while (more === 255); }
      room(literals);
      out.set(frame.subarray(at, at + literals), end);
      at += literals; end += literals;
      if (at >= stop) break;
      const offset = frame[at] | (frame[at + 1] << 8);
      at += 2;
      let copied = (token & 15) + 4;
      if (copied === 19) { let more; do copied += more = frame[at++]; while (more === 255); }
      room(copied);
      for (let i = 0; i < copied; i++, end++) out[end] = out[end - offset];
    }
    if (flags & 16) at += 4;
  }
  return out.subarray(0, end);
}

// A record as the fold reads it: its fields, `type`, `subject` and `time` in seconds. Null for a claim check.
export function message(msg) {
  const header = (name) => msg.headers?.get(name) ?? "";
  const type = header("Hr-Type").split("/")[0];
  if (!type || type === "blob_ref") return null;
  const data = header("Hr-Encoding") === "lz4" ? lz4(msg.data) : msg.data;
  const stored = header("Nats-Time-Stamp");
  const time = stored ? Date.parse(stored) / 1000 : Date.now() / 1000;
  return { ...decode(data), type, subject: header("Nats-Subject") || msg.subject, time };
}
