"""The trained model with the chat format of a family, whose tags take places in its vocabulary."""

import json
import shutil
from pathlib import Path

import dsa_compile
from examples.small_models.tokenizer import with_tags
from tests.chat.forms import GLM_TEMPLATE
from tests.trained import trained_model

TAGS = {
    "deepseek": ["｜DSML｜"],
    "glm": [
        *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    ],
}


def chat_artifact(family: str, folder: Path) -> Path:
    """An artifact in fp32 that speaks DeepSeek-V3.2's format or GLM-5's."""
    model = folder / "model"
    shutil.copytree(trained_model(), model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["chat_template"]
    if family == "glm":
        config["chat_template"] = GLM_TEMPLATE
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer = with_tags(tokenizer, TAGS[family])
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    dsa_compile.compile(str(model), str(folder / family), recipe="fp32", records=False)
    return folder / family
