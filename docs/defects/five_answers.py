"""Five wrong answers of Qwen3-Omni with two replicas per stage (vllm-omni 0.30.0).

Run it against a server: ``python five_answers.py URL MODEL``.
"""

import base64
import io
import json
import sys
import urllib.error
import urllib.request
import wave

url, model = sys.argv[1:]


def post(path="/v1/chat/completions", **body):
    data = json.dumps({"model": model, "max_tokens": 20, "temperature": 0, **body}).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def said(content):
    return [{"role": "user", "content": content}]


story, text = said("Tell me a story."), {"modalities": ["text"]}
print(post(messages=story, **text, logprobs=True, top_logprobs=3))  # 500, "Did not output logprobs"
_, two = post(messages=story, **text, n=2)
print(len(two["choices"]), "choice of two (streamed: two events with a role, then one choice)")
print(post("/v1/messages", messages=story))  # text or audio, whichever ended last; /v1/responses too

file = io.BytesIO()
with wave.open(file, "wb") as recording:
    recording.setparams((1, 2, 16000, 0, "NONE", ""))
    recording.writeframes(bytes(32000))
audio = {"data": base64.b64encode(file.getvalue()).decode(), "format": "wav"}
for _ in range(4):  # every second one, at the other replica: 500 ("cache drift" in the log)
    print(post(messages=said([{"type": "input_audio", "input_audio": audio}]), **text)[0])

word = two["choices"][0]["message"]["content"].split()[1]
# The talker gets no last chunk: 500 after VLLM_OMNI_INPUT_WAIT_TIMEOUT_S (ten minutes)
print(post(messages=story, modalities=["text", "audio"], stop=[word]))
