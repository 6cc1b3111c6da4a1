// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-dev/cloister/guard/publish/webhook"
)

func TestPublishing(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}
	const secret = "hunter2-hunter2"
	hook := file("hook", webhook.NewSecret().Text()+"\n"+webhook.NewPrivateKey().Text()+"\n")
	login, half := file("login", "me\n"+secret+"\n"), file("half", secret+"\n")
	none := filepath.Join(dir, "none")
	for _, c := range []struct {
		p    publishing
		want string // the publisher's type; "" refuses
	}{
		{publishing{target: "nats://127.0.0.1:1"}, "*nats.Publisher"},
		{publishing{target: "nats://127.0.0.1:1,127.0.0.1:2/EVENTS?prefix=a.b&create=true&replicas=3&max-age=24h"}, "*nats.Publisher"},
		{publishing{target: "kafka://127.0.0.1:1"}, "*kafka.Publisher"},
		{publishing{target: "kafka://127.0.0.1:1,127.0.0.1:2/events?tls=true", keyFile: login}, "*kafka.Publisher"},
		{publishing{target: "https://example.com/hook?x=y", keyFile: hook, publicOnly: true}, "*webhook.Publisher"},
		{publishing{target: "http://127.0.0.1:1/hook", keyFile: hook}, "*webhook.Publisher"},
		{publishing{target: "http://example.com/hook", keyFile: hook}, ""},
		{publishing{target: "https://example.com/hook"}, ""},
		{publishing{target: "https://example.com/hook", keyFile: half}, ""},
		{publishing{target: "https://example.com/hook", keyFile: hook, caFile: hook}, ""},
		{publishing{target: "nats://"}, ""},
		{publishing{target: "nats://a:1,"}, ""},
		{publishing{target: "nats://me:" + secret + "@a:1"}, ""},
		{publishing{target: "nats://a:1/x/y"}, ""},
		{publishing{target: "nats://a:1/x?creat=true"}, ""},
		{publishing{target: "nats://a:1?create=maybe"}, ""},
		{publishing{target: "nats://a:1?replicas=x"}, ""},
		{publishing{target: "nats://a:1?max-age=x"}, ""},
		{publishing{target: "nats://a:1?%zz"}, ""},
		{publishing{target: "nats://127.0.0.1:1", keyFile: none}, ""},
		{publishing{target: "nats://127.0.0.1:1", publicOnly: true}, ""},
		{publishing{target: "kafka://a:1?tls=maybe"}, ""},
		{publishing{target: "kafka://a:1?acks=0"}, ""},
		{publishing{target: "kafka://a:1", keyFile: half}, ""},
		{publishing{target: "kafka://a:1", caFile: half}, ""},
		{publishing{target: "amqp://a:1"}, ""},
		{publishing{target: "a:1"}, ""},
	} {
		pub, err := c.p.open(slog.New(slog.DiscardHandler))
		if err == nil {
			pub.Close()
		}
		if got := fmt.Sprintf("%T", pub); (err == nil) != (c.want != "") || err == nil && got != c.want {
			t.Errorf("%s: %s, %v", c.p.target, got, err)
		}
		if err != nil && strings.Contains(err.Error(), secret) {
			t.Errorf("%s: the error has a secret in it: %v", c.p.target, err)
		}
	}
}
