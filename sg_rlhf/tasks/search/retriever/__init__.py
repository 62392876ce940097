"""The search engine as a dialogue sees it: `client` asks one, `retriever_process` starts one."""
