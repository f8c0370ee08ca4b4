"""An OpenAI-compatible server for a language model on disk: requests share the passes through the model.

| module | what |
| --- | --- |
| `engine` | answers on their way through the model, one reading for all of them, and its figures for Prometheus |
| `responses` | answers in OpenAI's form, whole and as events |
| `app` | HTTP: routes, limits, keys |
| `server` | the listening socket, and the end |

Always true:
- one thread computes; a client can't make it wait
- whatever a client sends is answered or refused, and is never code; `generation` says what of it is understood
"""
