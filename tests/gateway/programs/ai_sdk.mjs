// An agent on the AI SDK: `node ai_sdk.mjs openai|compatible|anthropic URL KEY` writes files with a tool until the model
// is done, and then asks for an object by generateObject.
import { writeFileSync } from "node:fs";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [kind, url, apiKey] = process.argv.slice(2);
const baseURL = `${url}/v1`;
const provider = {
  openai: () => createOpenAI({ baseURL, apiKey }),
  compatible: () => createOpenAICompatible({ baseURL, apiKey, name: "headrace", supportsStructuredOutputs: true }),
  anthropic: () => createAnthropic({ baseURL, apiKey }),
}[kind]();
const model = provider("latest");
const write = tool({
  description: "Write a file.",
  inputSchema: z.object({ path: z.string(), text: z.string() }),
  execute: async ({ path, text }) => (writeFileSync(path, text), "written"),
});
const told = streamText({
  model,
  prompt: "write two files",
  tools: { write },
  stopWhen: stepCountIs(5),
  onError: ({ error }) => console.error(error),
});
console.log(await told.text);
if (kind !== "anthropic") {
  const { object } = await generateObject({ model, schema: z.object({ files: z.array(z.string()) }), prompt: "which?" });
  console.log(object.files);
}
