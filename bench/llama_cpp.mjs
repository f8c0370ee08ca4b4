// Seconds per token of llama.cpp, as JSON: node llama_cpp.mjs PACKAGE FILE THREADS WARM_UP TOKENS
// PACKAGE is the folder of node-llama-cpp: npm install --ignore-scripts node-llama-cpp
import { pathToFileURL } from "node:url";

const [folder, modelPath, threads, warmUp, tokens] = process.argv.slice(2);
const { getLlama } = await import(pathToFileURL(`${folder}/dist/index.js`));
const llama = await getLlama({ gpu: false, maxThreads: +threads, build: "never", logLevel: "error", progressLogs: false });
const model = await llama.loadModel({ modelPath, gpuLayers: 0 });
const sequence = (await model.createContext({ contextSize: 512, threads: +threads })).getSequence();
const times = [performance.now()];
for await (const _ of sequence.evaluate([1, 504, 314, 253], { temperature: 0, yieldEogToken: true })) {
  times.push(performance.now());
  if (times.length > 1 + +warmUp + +tokens) break;
}
const seconds = times.slice(1).map((time, index) => (time - times[index]) / 1000);
console.log(JSON.stringify(seconds.slice(1 + +warmUp)));
process.exit(0);
