# Finds a Python and makes virtual environments; sourced by the other scripts.

say() { printf '\n\033[1m== %s\033[0m\n' "$1" >&2; }

# $PYTHON, or an interpreter of at least 3.10. Root prefers the system's: other users may execute it.
find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        set -- "$PYTHON"
    else
        set -- /usr/bin/python3 python3 python3.15 python3.14 python3.13 python3.12 python3.11 python3.10
    fi
    for candidate in "$@"; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null &&
            "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    if [ -n "${PYTHON:-}" ]; then
        echo "PYTHON=$PYTHON is no Python 3.10 or newer with its venv module; name another, or unset PYTHON" >&2
        return 1
    fi
    echo "No Python 3.10 or newer with its venv module was found. Install one, for example:" >&2
    echo "    sudo apt-get install python3 python3-venv" >&2
    return 1
}

# Whether all users may enter a folder, or the nearest one above it that exists.
open_to_all() {
    local folder=$1
    while [ "$folder" != / ]; do
        [ ! -e "$folder" ] || [ $((0$(stat -Lc %a "$folder") & 1)) = 1 ] || return 1
        folder=$(dirname "$folder")
    done
}

# Prints the folder for an environment: beside the sources, unless root works in a folder that others
# may not enter, because tests that act as another user could not execute it there.
venv_folder() {
    local name=$1 sources=$2
    if [ "$(id -u)" = 0 ] && ! open_to_all "$sources"; then
        echo "/var/tmp/zeusd$name-$(printf %s "$sources" | cksum | cut -d' ' -f1)"
    else
        echo "$sources/$name"
    fi
}

# Makes sure that the home is writable: pip, matplotlib, shells and Hugging Face keep caches there.
have_home() {
    [ -n "${HOME:-}" ] && [ -d "$HOME" ] && [ -w "$HOME" ] && return
    export HOME=$1/home
    mkdir -p "$HOME"
    say "your home is not writable; caches are in $HOME"
}

# $3: the variable that names the folder.
make_venv() {
    local python=$1 venv=$2
    umask 022 # tests act as other users, who may not run what root's 077 would make
    if ! "$venv/bin/python" -c 'import pip' >/dev/null 2>&1; then
        say "making a virtual environment in $venv"
        rm -rf "$venv" && mkdir -p "$venv" && "$python" -m venv "$venv" || {
            echo "$venv cannot be made; name another folder with $3=" >&2
            return 1
        }
    fi
    have_home "$venv"
}
