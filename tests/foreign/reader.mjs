// Recounts a run's ledger and rebuilds its newest version of the weights, from docs/wire.md alone.
// node reader.mjs URL SEED_FILE RUN OBJECTS  ->  one line of JSON
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { decode, encode } from "@msgpack/msgpack";
import { connect, nkeyAuthenticator } from "@nats-io/transport-node";
import { jetstream, jetstreamManager } from "@nats-io/jetstream";
import { decompress as zstd } from "fzstd";
import { xxhash128 } from "hash-wasm";
import lz4 from "lz4js";
const [url, seedFile, run, objects] = process.argv.slice(2);
const seed = new TextEncoder().encode(readFileSync(seedFile, "ascii").trim());
const nc = await connect({ servers: url, authenticator: nkeyAuthenticator(seed), inboxPrefix: "_INBOX.operator" });
const js = jetstream(nc), jsm = await jetstreamManager(nc);
const sha256 = (data) => createHash("sha256").update(data).digest("hex");
let skipped = 0; // records that could not be read
async function message(record) {
  const header = (name) => (record.header ?? record.headers)?.get(name) ?? "";
  let [type, data, encoding] = [header("Hr-Type"), record.data, header("Hr-Encoding")];
  if (type === "blob_ref/1") {
    const ref = decode(data), chunks = [];
    for (let n = 0; n < ref.chunks; n++) {
      const last_by_subj = `hr.blob.${ref.sha256}${ref.keyed ? "-" : "."}${n}`;
      chunks.push((await jsm.streams.getMessage("HR_BLOB", { last_by_subj })).data);
    }
    [data, type, encoding] = [Buffer.concat(chunks), ref.type, ref.encoding ?? ""];
    if (!ref.keyed && sha256(data) !== ref.sha256) throw new Error("a claim check's payload is damaged");
  }
  if (encoding === "lz4") data = lz4.decompress(data);
  return { ...decode(data), type: type.split("/")[0] };
}
async function history(stream, filter) {
  const out = [], consumer = await js.consumers.get(stream, { filter_subjects: [filter] });
  let left = (await consumer.info()).num_pending;
  if (!left) return out;
  for await (const record of await consumer.consume()) {
    try { out.push(await message(record)); } catch { skipped++; }
    if (--left === 0) break;
  }
  return out;
}
async function ledger() {
  const [issued, groups, fates, closed, steps] = [new Set(), new Map(), new Map(), new Map(), new Map()];
  for (const m of await history("HR_LEDGER", `hr.ledger.${run}.>`))
    if (m.type === "slot_issued" && m.lane === "train")
      issued.add(`${m.group}/${m.slot}`), groups.set(m.group, m.group_size);
  const dropAll = (group) => [...Array(groups.get(group)).keys()].forEach((n) => fates.set(`${group}/${n}`, "dropped"));
  for (const m of await history("HR_SCORE", `hr.close.${run}.>`))
    if (m.type === "group_closed") closed.set(m.group, m);
    else if (m.type === "group_dropped") dropAll(m.group);
  for (const m of await history("HR_STEP", `hr.step.${run}`))
    if (m.type === "step_done" || m.type === "step_failed")
      if ((m.incarnation ?? 0) >= (steps.get(m.step)?.incarnation ?? 0)) steps.set(m.step, m);
  for (const m of closed.values())
    for (const slot of Object.keys(m.dropped_slots ?? {})) fates.set(`${m.group}/${slot}`, "dropped");
  for (const step of steps.values())
    for (const group of step.groups)
      for (const { slot } of closed.get(group).slots)
        fates.set(`${group}/${slot}`, step.type === "step_done" ? "trained" : "dropped");
  const count = (fate) => [...fates.values()].filter((one) => one === fate).length;
  const in_flight = issued.size - fates.size;
  return { issued: issued.size, trained: count("trained"), dropped: count("dropped"), in_flight };
}
const BLOCK = 4194304, WIDTH = (dtype) => (/^(BF|F|I)16$/.test(dtype) ? 2 : /(32|64)$/.test(dtype) ? 4 : 1);
const EXPONENT = { BF16: [7, 0xff], F16: [10, 0x1f], F32: [23, 0xff], F8_E4M3: [3, 0x0f], F8_E5M2: [2, 0x1f] };
const array = (width, n) => new { 1: Uint8Array, 2: Uint16Array, 4: Uint32Array }[width](n);
function unitsOf(tensors) {
  const units = [], opened = new Map();
  tensors.forEach(({ dtype, shape, shard = 0 }, tensor) => {
    const items = shape.reduce((a, b) => a * b, 1) * (dtype.endsWith("64") ? 2 : 1);
    for (let start = 0; start < items; start += BLOCK) {
      const count = Math.min(BLOCK, items - start), key = `${dtype}/${shard}`, fresh = { dtype, items: 0, parts: [] };
      let unit = opened.get(key) ?? fresh;
      if (unit.items + count > BLOCK && unit.items) [unit] = [fresh, units.push(unit)];
      opened.set(key, unit);
      unit.parts.push({ tensor, start, at: unit.items, count });
      unit.items += count;
    }
  });
  return [...units, ...opened.values()];
}
function open([kind, size, data]) {
  if (kind < 2) return kind ? zstd(data) : data;
  const out = new Uint8Array(size);
  lz4.decompressBlock(data, out, 0, data.length, 0);
  return out;
}
function unplanes(bytes, width) {
  const n = bytes.length / width, out = array(width, n);
  for (let i = 0; i < n; i++) for (let b = 0; b < width; b++) out[i] += bytes[b * n + i] * 2 ** (8 * b);
  return out;
}
const unzigzag = (z) => ((z >>> 1) ^ -(z & 1)) >>> 0;
function positions(gaps) {
  let [out, at] = [[], -1];
  for (const gap of gaps) if (gap === 255) at += 255; else out.push((at += gap + 1));
  return out;
}
function apply([, start, count, codec, , , , streams], view, dtype) {
  const width = WIDTH(dtype), put = (at, z) => { view[start + at] = view[start + at] + unzigzag(z); };
  const opened = streams.map(open), groups = [];
  if (codec === 0 || codec === 2)
    return unplanes(Buffer.concat(opened), width).forEach((value, at) =>
      codec ? put(at, value) : (view[start + at] = value));
  let wide = unplanes(opened.at(-1), width), next = 0;
  if (codec === 1) groups.push([positions(opened[0]), opened[1]]);
  else
    for (let c = 0; c < opened[0].length / 2; c++) {
      const [low, high] = [opened[0][2 * c], opened[0][2 * c + 1]], [shift, mask] = EXPONENT[dtype], members = [];
      for (let at = 0; at < count; at++) {
        const exponent = (view[start + at] >>> shift) & mask;
        if (exponent >= low && exponent <= high) members.push(at);
      }
      groups.push([positions(opened[1 + 2 * c]).map((rank) => members[rank]), opened[2 + 2 * c]]);
    }
  for (const [at, values] of groups)
    values.forEach((value, i) => put(at[i], value === 255 && width > 1 ? wide[next++] : value));
}
const record = async (seq) => message(await jsm.streams.getMessage("HR_WEIGHTS", { seq }));
const object = ({ version, chunks }) =>
  readFileSync(`${objects}/${version}-${sha256(chunks.map((chunk) => chunk.sha256).join("")).slice(0, 32)}.chunks`);
async function version() {
  const head = (await history("HR_WEIGHTS", `hr.weights.${run}.head`)).at(-1), chain = [];
  do chain.unshift(await record(chain[0]?.base_seq ?? head.manifest_seq));
  while (chain[0].base_version >= 0);
  const units = unitsOf(chain[0].tensors), views = units.map((unit) => array(WIDTH(unit.dtype), unit.items));
  for (const manifest of chain)
    for (let next = 0, n = 0; n < manifest.chunks.length; n++) {
      const chunk = manifest.chunks[n], from = next;
      next += chunk.bytes;
      const data = manifest.detached ? object(manifest).subarray(from, next) : (await record(chunk.stream_seq)).data;
      if (sha256(data) !== chunk.sha256) throw new Error(`chunk ${chunk.seq} is damaged`);
      for (let at = 0, size; at < data.length; at += 4 + size) {
        size = Buffer.from(data).readUInt32LE(at);
        const frame = decode(data.subarray(at + 4, at + 4 + size));
        apply(frame, views[frame[0]], units[frame[0]].dtype);
      }
    }
  const blocks = [], manifest = chain.at(-1);
  for (const [u, unit] of units.entries())
    for (const { tensor, start, at, count } of unit.parts) {
      const part = views[u].subarray(at, at + count);
      blocks.push([tensor, start, await xxhash128(new Uint8Array(part.buffer, part.byteOffset, part.byteLength))]);
    }
  blocks.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  const hashes = Buffer.from(blocks.map((block) => block[2]).join(""), "hex");
  const names = encode(manifest.tensors.map(({ name, dtype, shape }) => [name, dtype, shape])), size = Buffer.alloc(8);
  size.writeBigUInt64LE(BigInt(names.length));
  const rebuilt = await xxhash128(Buffer.concat([size, names, hashes]));
  return { version: head.version, manifests: chain.length, state_hash: rebuilt, claimed: head.state_hash };
}
console.log(JSON.stringify({ ...(await ledger()), ...(await version()), skipped }));
await nc.close();
