#!/usr/bin/env bash
# Prepare a release: check that everything agrees, build, and try the wheel in an empty environment.
# Nothing is uploaded. The last lines say which command uploads.
#
#     scripts/release.sh [--tests] [--demo]
#
#     --tests   run style, types and all tests first (hours on 2 cores)
#     --demo    let the demo learn from the wheel, outside of the repository (minutes)
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
tests=false
demo=false
for word in "$@"; do
    case $word in
        --tests) tests=true ;;
        --demo) demo=true ;;
        -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) echo "release: unknown option $word; there are --tests and --demo" >&2; exit 2 ;;
    esac
done

stop() {
    echo "release: $1" >&2
    exit 1
}

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' src/hybridflow/__init__.py)
test -n "$version" || stop "src/hybridflow/__init__.py has no line __version__ = \"…\""
tag=v$version

changed=$(git status --porcelain)
test -z "$changed" || stop "the tree is not clean: commit or remove
$changed"

heading=$(grep -m 1 '^## ' CHANGELOG.md || true)
date_of_release=$(date -u +%F)
[[ $heading =~ ^"## $version, "[0-9]{4}-[0-9]{2}-[0-9]{2}$ ]] ||
    stop "the first heading of CHANGELOG.md is '$heading', wanted '## $version, YYYY-MM-DD' (today is $date_of_release)"
grep -qx "version: $version" CITATION.cff || stop "CITATION.cff wants the line 'version: $version'"

tagged=$(git rev-parse --verify --quiet "refs/tags/$tag^{commit}" || true)
test -n "$tagged" || stop "there is no tag $tag: git tag -a $tag -m $tag"
test "$tagged" = "$(git rev-parse HEAD)" || stop "the tag $tag is not on this commit but on $tagged"

if $tests; then
    make check test test-slow
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "[1/3] building"
rm -rf dist
"$PYTHON" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install --quiet "build>=1.2" "twine>=6.1"
"$work/tools/bin/python" -m build --outdir dist . > "$work/build.log" || { cat "$work/build.log" >&2; stop "the build failed"; }
"$work/tools/bin/python" -m twine check --strict dist/*

echo "[2/3] the wheel in an empty environment"
"$PYTHON" -m venv "$work/empty"
"$work/empty/bin/python" -m pip install --quiet "$(grep '^torch==' constraints.txt)"
"$work/empty/bin/python" -m pip install --quiet dist/*.whl
"$work/empty/bin/python" -m pip check
(
    cd "$work"
    test "$(empty/bin/hybridflow --version)" = "hybridflow $version"
    empty/bin/hybridflow doctor > /dev/null
    empty/bin/hybridflow explain --recipe grpo > /dev/null
    if $demo; then
        empty/bin/hybridflow demo
    fi
)

echo "[3/3] ready:"
ls -l dist
$tests || echo "The tests were not run: give --tests, or look at CI for this commit."
echo "To publish: git push origin $tag, then python -m twine upload dist/*"
