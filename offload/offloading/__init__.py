"""Results that go to disk as they come: the context `offloading`.

| module | what |
| --- | --- |
| `context` | the context itself, and the two modes of torch's behind it |
| `place` | where results go, how large they have to be, what they are called |
| `made` | results that are computed straight into their file |
| `opened` | tensors that torch.load and safetensors take from a file inside |
"""
