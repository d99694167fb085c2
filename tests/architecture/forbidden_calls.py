"""Search for forbidden calls in sources: executing file contents, or using a shell."""

import ast
from collections.abc import Iterator

# These modules and calls execute the contents of the file that they read.
EXECUTING_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
EXECUTING_CALLS = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "pty.spawn"),
    *("torch.load", "pandas.read_pickle", "pd.read_pickle", "tf.keras.models.load_model"),
    *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "yaml.Loader"),
    *("subprocess.getoutput", "subprocess.getstatusoutput", "tempfile.mktemp"),
    *("np.fromregex", "mlflow.pyfunc.load_model", "logging.config.listen"),
}
ARRAYS = {"np.load", "numpy.load"}


def findings(source: str) -> Iterator[str]:
    """Yield `LINE: call` for each forbidden call in the source."""
    for node in ast.walk(ast.parse(source)):
        for call in _forbidden(node):
            yield f"{getattr(node, 'lineno', 0)}: {call}"


def _forbidden(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (n.name for n in node.names if n.name.split(".")[0] in EXECUTING_MODULES)
    elif isinstance(node, ast.ImportFrom):
        if (node.module or "").split(".")[0] in EXECUTING_MODULES:
            yield str(node.module)
    elif isinstance(node, ast.Call):
        name, named = ast.unparse(node.func), {k.arg: k.value for k in node.keywords}
        if name in EXECUTING_CALLS:
            yield name
        shell = named.get("shell")
        if shell is not None and not _is(shell, False):
            yield f"{name} through a shell"
        if name in ARRAYS and not _is(named.get("allow_pickle"), False):
            yield f"{name} without allow_pickle=False"
        if not _is(named.get("allow_pickle", ast.Constant(False)), False):
            yield f"{name} with pickles"
        if name.endswith("extractall") and "filter" not in named:
            yield f"{name} without a filter: an archive's paths may lead outside"


def _is(value: ast.expr | None, constant: object) -> bool:
    return isinstance(value, ast.Constant) and value.value is constant
