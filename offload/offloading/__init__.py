"""Results that go to disk as they come: the context `offloading`.

What an op gives is, in this order: left alone, if it is a view or the op is traced; computed straight into its file, if
it is large and its kind of op is known for that; written to a file after, if it is large, dense and new; else left in
memory. What is loaded is referenced where its file can be told. The log says at debug level which way each took.

| module | what |
| --- | --- |
| `context` | the context itself, and the two modes of torch's behind it |
| `place` | where results go, how large they have to be, what they are called |
| `made` | results that are computed straight into their file |
| `opened` | tensors that torch.load and safetensors take from a file inside |
"""
