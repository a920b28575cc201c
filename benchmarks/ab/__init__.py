r"""``python -m benchmarks.ab``: compare two settings of a server of your own, under the load of your own client.

    python -m benchmarks.ab --starts 6 --a OMNI_FASTPATH=0 --b OMNI_FASTPATH=1 \
      -- vllm serve MODEL --omni --port {port} \
      -- vllm bench serve --omni --port {port} --model MODEL \
           --backend openai-chat-omni --endpoint /v1/chat/completions \
           --dataset-name random --random-input-len 100 --random-output-len 100 \
           --num-prompts 300 --request-rate RATE \
           --percentile-metrics ttft,tpot,itl,e2el,audio_ttfp,audio_rtf,audio_underrun \
           --save-result --result-filename {result}

It starts the server in each setting in turn (A B B A ...), runs the client, and judges the differences. A setting is
variables (NAME=VALUE, --a may be repeated) and at most one deploy YAML (a path that ends in .yaml), which is added to
the server's command. What this shell says of the plugin is left out. {port} and {result} are filled in; no shell is
used. The server must answer at http://127.0.0.1:PORT.

Before and after the load, the state files of a server's processes must show that it runs its setting. Each server also
gets fixed requests, chat or speech as the client's endpoint says. Their answers are compared byte by byte if all starts
of A answer identically, otherwise by errors, ends and lengths.

A verdict is an exact rank test over starts: four of each setting can show a difference in the primary measure (median
time to first audio, else to first text, or --primary KEY), six also in nine others. All keys are those of the client's
result. Each start is a line of results/ab.jsonl.

Exit codes: 0: no measure is worse, and the answers agree. 1: a measure is worse or exists for A only, more requests
failed, the answers differ, or it could not be measured. 2: wrong command line. 130: interrupted. No process is left in
any case.
"""
