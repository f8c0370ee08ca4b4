// What each token of llama.cpp takes, as JSON: node llama_cpp.mjs PACKAGE FILE WARM_UP TOKENS SECONDS THREADS
// PACKAGE is the folder of node-llama-cpp: npm install --ignore-scripts node-llama-cpp
// The other arguments, and the result, are those of `python -m bench.tokens_apart`.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, modelPath, warmUp, tokens, limit, threads] = process.argv.slice(2);
const { getLlama } = await import(pathToFileURL(`${folder}/dist/index.js`));
const llama = await getLlama({ gpu: false, maxThreads: +threads, build: "never", logLevel: "error", progressLogs: false });
const model = await llama.loadModel({ modelPath, gpuLayers: 0, ignoreMemorySafetyChecks: true });
const context = await model.createContext({ contextSize: 512, threads: +threads, ignoreMemorySafetyChecks: true });
const steps = context.getSequence().evaluate([1, 504, 314, 253], { temperature: 0, yieldEogToken: true });
await steps.next();

const readBytes = () => +/^read_bytes: (\d+)/m.exec(readFileSync("/proc/self/io", "utf8"))[1];
let last = 0;
async function decode(count) {
  const done = [];
  for (const end = performance.now() + 1000 * limit; done.length < count && (!done.length || performance.now() < end); ) {
    const start = performance.now();
    const before = readBytes();
    await steps.next(((last += 1) * 7919) % 40_000);
    done.push([(performance.now() - start) / 1000, readBytes() - before]);
  }
  return done;
}
await decode(+warmUp);
console.log(JSON.stringify(await decode(+tokens)));
process.exit(0);
