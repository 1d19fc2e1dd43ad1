package request

import (
	"strconv"
	"strings"
	"unicode"
)

// maxShown bounds what an error repeats of a value, in runes: kubelet cuts
// events at 1024 bytes.
const maxShown = 64

// quote returns s in quotes, on one line, and cut when it is long.
func quote(s string) string {
	if runes := []rune(s); len(runes) > maxShown {
		return strconv.Quote(string(runes[:maxShown])) + "..."
	}
	return strconv.Quote(s)
}

// plain returns s as it is when it can stand in a sentence, else in quotes.
func plain(s string) string {
	odd := func(r rune) bool { return unicode.IsSpace(r) || !strconv.IsPrint(r) || r == unicode.ReplacementChar }
	if s == "" || strings.ContainsFunc(s, odd) {
		return quote(s)
	}
	return s
}

// oneLine returns the text of another package as it is when it is one printable
// line, else in quotes.
func oneLine(s string) string {
	if strings.ContainsFunc(s, func(r rune) bool { return !strconv.IsPrint(r) }) {
		return quote(s)
	}
	return s
}

// nearest returns the known word that was most likely meant: same but for case,
// or at most two letters off; "" when none is.
func nearest(word string, known []string) string {
	best, least := "", 3
	for _, candidate := range known {
		if d := distance(strings.ToLower(word), strings.ToLower(candidate)); d < least && d < len(candidate)/2+1 {
			best, least = candidate, d
		}
	}
	return best
}

// distance is the number of bytes to insert, remove or replace between a and b
// (Levenshtein), or a large number where their lengths alone tell.
func distance(a, b string) int {
	if len(a) > len(b)+2 {
		return len(a)
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j+1]+1, row[j]+1)
		}
	}
	return row[len(b)]
}
