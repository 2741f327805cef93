# Finds the programs of tools.txt, and installs missing ones; sourced by scripts/test.

tools_list() { sed -e '/^#/d' -e '/^$/d' scripts/lib/tools.txt; }

# Whether one of several alternatives is installed: PROGRAM, /FILE (or a pattern), python3:MODULE.
is_there() {
    local alternatives one
    IFS='|' read -r -a alternatives <<<"$1"
    for one in "${alternatives[@]}"; do
        case $one in
            python3:*) "${SYSTEM_PYTHON:-/usr/bin/python3}" -c "import ${one#*:}" 2>/dev/null && return ;;
            /*) compgen -G "$one" >/dev/null && return ;;
            *) command -v "$one" >/dev/null && return ;;
        esac
    done
    return 1
}

# Prints the packages of each missing tool, of those named or of all.
missing_tools() {
    local line name shown_by packages one
    while read -r line; do
        read -r name shown_by <<<"${line%%:\ *}"
        packages=${line##*: }
        [ $# -eq 0 ] || [[ " $* " == *" $name "* ]] || continue
        for one in $shown_by; do
            is_there "$one" || { echo "$name: $packages"; break; }
        done
    done < <(tools_list)
}

install_tools() {
    local missing packages=() absent=() one
    missing=$(missing_tools "$@")
    [ -n "$missing" ] || return 0
    if ! command -v apt-get >/dev/null; then
        echo "This system has no apt-get. Install these with its own package manager" >&2
        echo "(the names after the colon are Debian's packages):" >&2
        sed 's/^/    /' <<<"$missing" >&2
        return 1
    fi
    if [ "$(id -u)" != 0 ]; then
        echo "Only root can install packages: sudo scripts/test --tools" >&2
        sed 's/^/    /' <<<"$missing" >&2
        return 1
    fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    for one in $(sed 's/^[^:]*://' <<<"$missing"); do
        # For example, Ubuntu has no chromium.
        if apt-cache show "$one" >/dev/null 2>&1; then packages+=("$one"); else absent+=("$one"); fi
    done
    [ ${#packages[@]} -eq 0 ] || apt-get install -y -qq --no-install-recommends "${packages[@]}"
    [ ${#absent[@]} -eq 0 ] || echo "Not among this system's packages: ${absent[*]}" >&2
}
