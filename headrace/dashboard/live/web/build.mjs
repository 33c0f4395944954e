// Bundles src/ into ../static/app.js, beside its licences and the hash of its sources (tests/dashboard/live compares it).
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const out = "../static";
await build({
  entryPoints: ["src/main.js"], outfile: `${out}/app.js`, bundle: true, minify: true, format: "esm",
  target: "es2022", legalComments: "none", charset: "utf8",
});
const style = readFileSync("node_modules/uplot/dist/uPlot.min.css", "utf8") + readFileSync("src/style.css", "utf8");
writeFileSync(`${out}/style.css`, style);
const licences = [["@nats-io/nats-core", "LICENSE"], ["@nats-io/nkeys", "LICENSE"], ["@nats-io/nuid", "LICENSE"],
  ["tweetnacl", "LICENSE"], ["uplot", "LICENSE"]].map(([name, file]) => {
  const { version, license } = JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8"));
  return `${name} ${version} (${license})\n\n${readFileSync(`node_modules/${name}/${file}`, "utf8")}`;
});
writeFileSync(`${out}/LICENSES.txt`, licences.join(`\n${"-".repeat(80)}\n\n`));
const hash = createHash("sha256");
for (const file of ["build.mjs", "package.json", ...readdirSync("src", { recursive: true }).filter((name) => /\.(js|css)$/.test(name)).map((name) => `src/${name}`).sort()])
  hash.update(`${file}\n`).update(readFileSync(file));
writeFileSync(`${out}/sources.sha256`, `${hash.digest("hex")}\n`);
