"""One speech request whose text has a lone surrogate ends the server (vllm-omni 0.28.0, 0.30.0, 0.32.0rc1).

``Orchestrator._handle_add_request`` submits the request to stage 0, where msgpack raises UnicodeEncodeError.
``_dispatch_or_fail_request`` fails a request alone on OverflowError only. Any other exception ends the orchestrator.

Expected: 400 for the second request and 200 for the third. Seen: 500, 500, and then 503 from /health.
Run it against a server of Qwen3-TTS: ``python lone_surrogate.py http://localhost:8000``.
"""

import json
import sys
import urllib.error
import urllib.request

for text in ("Hello.", "\ud800", "Hello again."):
    body = json.dumps({"input": text, "voice": "vivian"}).encode()
    request = urllib.request.Request(sys.argv[1] + "/v1/audio/speech", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            print(answer.status, len(answer.read()), "bytes of audio")
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode())
