"""Light engines: stage engines without scheduler, runner or connector, for instruments that must see the whole server.

A light engine speaks vLLM's engine protocol and sends each live request's raw outputs on the clock. All engines of a
server live in one process that imports neither vLLM nor torch, so that they leave the processors to what is measured:
API server, front end and orchestrator, which are upstream's own.

`manager` puts them in the place of upstream's stage processes, in the server; `host` is their process. There `wire`
speaks msgpack, `engine` makes the steps of one engine and `sender` sends them, `behaviour` says what its stage answers
and `stream` what one request has from stage to stage. Steps need no real time: `benchmarks.limit` makes them on a clock
that jumps.

The answers are those of the simulated stages, byte for byte: both follow from the request's content by `content`.
"""
