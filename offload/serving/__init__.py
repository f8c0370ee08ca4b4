"""An OpenAI-compatible server for a language model on disk: requests share the passes through the model.

| module | what |
| --- | --- |
| `bodies` | what a request asks for, and refusals in OpenAI's form |
| `chat` | what requests say, in tokens; messages by the chat template of the model |
| `limited` | computing what a file of others says, such as a chat template, within limits |
| `engine` | answers on their way through the model, one reading for all of them |
| `answering` | one answer: `generate`, and the scores of a prompt |
| `text` | tokens as text, as they come, up to a stop string |
| `responses` | answers in OpenAI's form, whole and as events |
| `figures` | what a server does, in Prometheus' text form |
| `app` | HTTP: routes, limits, keys |
| `server` | the listening socket, and the end |

Always true:
- one thread computes; a client can't make it wait
- whatever a client sends is answered or refused, and is never code
"""
