# Finds a Python and makes virtual environments; sourced by the other scripts.

say() { printf '\n\033[1m== %s\033[0m\n' "$1" >&2; }

# An interpreter of at least 3.10. Root prefers the system's: other users may execute it.
find_python() {
    local candidate
    for candidate in ${PYTHON:-} /usr/bin/python3 python3 python3.13 python3.12 python3.11 python3.10; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null &&
            "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "No Python 3.10 or newer with its venv module was found. Install one, for example:" >&2
    echo "    sudo apt-get install python3 python3-venv" >&2
    return 1
}

# Prints the folder for an environment: beside the sources, unless root works in a folder that others
# may not enter, because tests that act as another user could not execute it there.
venv_folder() {
    local name=$1 sources=$2 folder=$2
    if [ "$(id -u)" = 0 ]; then
        while [ "$folder" != / ]; do
            if [ $((0$(stat -c %a "$folder") & 1)) = 0 ]; then
                echo "/var/tmp/zeusd$name-$(printf %s "$sources" | cksum | cut -d' ' -f1)"
                return
            fi
            folder=$(dirname "$folder")
        done
    fi
    echo "$sources/$name"
}

# Makes sure that the home is writable: pip, matplotlib, shells and Hugging Face keep caches there.
have_home() {
    [ -n "${HOME:-}" ] && [ -d "$HOME" ] && [ -w "$HOME" ] && return
    export HOME=$1/home
    mkdir -p "$HOME"
    say "your home is not writable; caches are in $HOME"
}

make_venv() {
    local python=$1 venv=$2
    if ! "$venv/bin/python" -c 'import pip' >/dev/null 2>&1; then
        say "making a virtual environment in $venv"
        rm -rf "$venv"
        "$python" -m venv "$venv"
    fi
    have_home "$venv"
}
