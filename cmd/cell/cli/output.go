// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
)

func writeJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// print writes v as JSON when that was asked for, else through text.
func (a *app) print(v any, text func(w io.Writer) error) error {
	if a.json {
		return writeJSON(a.out, v)
	}
	return text(a.out)
}

// table writes rows in columns; the first row is the heading.
func table(w io.Writer, rows [][]string) error {
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	for _, r := range rows {
		if _, err := fmt.Fprintln(tw, strings.Join(r, "\t")); err != nil {
			return err
		}
	}
	return tw.Flush()
}

// short prints a duration with three figures: 12.3ms, 1.25s.
func short(d time.Duration) string {
	switch {
	case d <= 0:
		return "-"
	case d < time.Millisecond:
		return fmt.Sprintf("%dµs", d.Microseconds())
	case d < time.Second:
		return fmt.Sprintf("%.1fms", float64(d.Microseconds())/1000)
	case d < time.Minute:
		return fmt.Sprintf("%.2fs", d.Seconds())
	default:
		return d.Round(time.Second).String()
	}
}

func ago(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return short(time.Since(t).Round(time.Millisecond)) + " ago"
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
