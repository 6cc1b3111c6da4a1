// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/internal/files"
	"github.com/cloister-dev/cloister/member/signin"
	"github.com/cloister-dev/cloister/member/signin/bot"
	signinpg "github.com/cloister-dev/cloister/member/signin/postgres"
)

// botFlags say in which cell's database a bot is.
type botFlags struct{ dsn, env string }

func (fl *botFlags) add(c *cobra.Command) {
	c.Flags().StringVar(&fl.env, "env-file", "", "file with the cell's settings, NAME=value a line, instead of the environment")
	c.Flags().StringVar(&fl.dsn, "dsn", "", "the cell's Postgres; default: $CELL_DSN")
}

func (fl *botFlags) open(ctx context.Context) (signin.Store, error) {
	get := os.LookupEnv
	if fl.env != "" {
		var err error
		if get, err = readEnvFile(fl.env); err != nil {
			return nil, &usageError{err}
		}
	}
	dsn := fl.dsn
	if dsn == "" {
		dsn, _ = get("CELL_DSN")
	}
	if dsn == "" {
		return nil, usagef("the cell's Postgres is needed: --dsn or $CELL_DSN")
	}
	return signinpg.Open(ctx, dsn, signinpg.Options{Checked: true, Connections: 2})
}

type botView struct {
	Name       string    `json:"name"`
	Thumbprint string    `json:"thumbprint"`
	Admin      bool      `json:"platform_admin"`
	Disabled   bool      `json:"disabled"`
	Created    time.Time `json:"created"`
}

func (a *app) botCmd() *cobra.Command {
	c := &cobra.Command{Use: "bot", Short: "Machine identities of a cell that prove themselves with a key", Args: cobra.NoArgs}
	c.AddCommand(a.botKeyCmd(), a.botCreateCmd(), a.botDisableCmd(), a.botListCmd(), a.botAuditCmd(), a.botTokenCmd())
	return c
}

func (a *app) botKeyCmd() *cobra.Command {
	var file string
	c := &cobra.Command{Use: "new-key --key-file FILE", Short: "Make a bot's key, offline; prints the public key and its thumbprint", Args: cobra.NoArgs}
	c.Flags().StringVar(&file, "key-file", "", "where the private key is written, for its owner alone; it must not exist")
	_ = c.MarkFlagRequired("key-file")
	c.RunE = func(*cobra.Command, []string) error {
		if _, err := os.Lstat(file); !errors.Is(err, os.ErrNotExist) {
			return usagef("--key-file: %s exists", file)
		}
		private, public, thumb, err := bot.NewKey()
		if err != nil {
			return err
		}
		if err := files.Write(file, append(private, '\n'), 0o600); err != nil {
			return err
		}
		return a.print(struct {
			Public     json.RawMessage `json:"public_key"`
			Thumbprint string          `json:"thumbprint"`
		}{public, thumb}, func(w io.Writer) error {
			_, err := fmt.Fprintf(w, "%s\nthumbprint %s\n", public, thumb)
			return err
		})
	}
	return c
}

func (a *app) botCreateCmd() *cobra.Command {
	var fl botFlags
	var file string
	var admin bool
	c := &cobra.Command{
		Use:   "create NAME --public-key FILE [--platform-admin]",
		Short: "Make a bot in a cell, or give it another key",
		Long: `Make a bot in the cell's database, or give one another key, which ends what the key
before opened. A bot has no email and SCIM never revokes it. With --platform-admin it may
act in every tenant that the cell holds: every cell has one for break-glass and another
one for attach and cell each. Give its name and thumbprint to prepare and attach with
--bot. The private key stays where it is; FILE may be either half.`,
		Args: cobra.ExactArgs(1),
	}
	fl.add(c)
	c.Flags().StringVar(&file, "public-key", "", "file with the bot's key, a JSON Web Key of type Ed25519 or P-256")
	c.Flags().BoolVar(&admin, "platform-admin", false, "it may act in every tenant of the cell")
	_ = c.MarkFlagRequired("public-key")
	c.RunE = func(cmd *cobra.Command, args []string) error {
		if err := bot.CheckName(args[0]); err != nil {
			return &usageError{err}
		}
		b, err := os.ReadFile(file)
		if err != nil {
			return usagef("--public-key: %w", err)
		}
		public, thumb, err := bot.Public(b)
		if err != nil {
			return usagef("--public-key: %w", err)
		}
		s, err := fl.open(cmd.Context())
		if err != nil {
			return err
		}
		defer s.Close()
		made := signin.Bot{Name: args[0], Key: public, Thumbprint: thumb, Admin: admin}
		if err := s.PutBot(cmd.Context(), made, signin.Entry{Actor: actor(), Action: "bot.create", Detail: fmt.Sprintf("%s, key %s, platform admin: %t", made.Name, thumb, admin)}); err != nil {
			return err
		}
		return a.print(botView{Name: made.Name, Thumbprint: thumb, Admin: admin}, func(w io.Writer) error {
			_, err := fmt.Fprintf(w, "%s=%s\n", made.Name, thumb)
			return err
		})
	}
	return c
}

func (a *app) botDisableCmd() *cobra.Command {
	var fl botFlags
	var yes bool
	c := &cobra.Command{Use: "disable NAME", Short: "Disable a bot, and end its tokens", Args: cobra.ExactArgs(1)}
	fl.add(c)
	c.Flags().BoolVar(&yes, "yes", false, "do not ask")
	c.RunE = func(cmd *cobra.Command, args []string) error {
		s, err := fl.open(cmd.Context())
		if err != nil {
			return err
		}
		defer s.Close()
		b, err := s.Bot(cmd.Context(), args[0])
		if err != nil {
			return err
		}
		if err := a.confirm(yes, "Disabling bot "+b.Name+" ends its tokens."); err != nil {
			return err
		}
		b.Disabled = true
		return s.PutBot(cmd.Context(), b, signin.Entry{Actor: actor(), Action: "bot.disable", Detail: b.Name})
	}
	return c
}

func (a *app) botListCmd() *cobra.Command {
	var fl botFlags
	c := &cobra.Command{Use: "list", Short: "List a cell's bots", Args: cobra.NoArgs}
	fl.add(c)
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		s, err := fl.open(cmd.Context())
		if err != nil {
			return err
		}
		defer s.Close()
		list, err := s.Bots(cmd.Context())
		if err != nil {
			return err
		}
		out := []botView{}
		for _, b := range list {
			out = append(out, botView{b.Name, b.Thumbprint, b.Admin, b.Disabled, b.Created})
		}
		return a.print(out, func(w io.Writer) error {
			lines := [][]string{{"NAME", "PLATFORM ADMIN", "DISABLED", "CREATED", "THUMBPRINT"}}
			for _, b := range out {
				lines = append(lines, []string{b.Name, fmt.Sprint(b.Admin), fmt.Sprint(b.Disabled), b.Created.Format(time.RFC3339), b.Thumbprint})
			}
			return table(w, lines)
		})
	}
	return c
}

func (a *app) botAuditCmd() *cobra.Command {
	var fl botFlags
	var since time.Duration
	c := &cobra.Command{Use: "audit", Short: "List the uses and changes of a cell's bots", Args: cobra.NoArgs}
	fl.add(c)
	c.Flags().DurationVar(&since, "since", 30*24*time.Hour, "how far back")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		s, err := fl.open(cmd.Context())
		if err != nil {
			return err
		}
		defer s.Close()
		out := []signin.Entry{}
		for after, from := "", time.Now().Add(-since); ; {
			list, err := s.Audit(cmd.Context(), after, 500)
			if err != nil {
				return err
			}
			if len(list) == 0 {
				break
			}
			for _, e := range list {
				if e.At.After(from) {
					out = append(out, e)
				}
			}
			after = list[len(list)-1].ID
		}
		return a.print(out, func(w io.Writer) error {
			lines := [][]string{{"AT", "ACTOR", "ACTION", "DETAIL"}}
			for _, e := range out {
				lines = append(lines, []string{e.At.Format(time.RFC3339), e.Actor, e.Action, dash(e.Detail)})
			}
			return table(w, lines)
		})
	}
	return c
}

func (a *app) botTokenCmd() *cobra.Command {
	var p bot.Proof
	var key, file string
	c := &cobra.Command{
		Use:   "token NAME --base URL --key-file FILE --token-file FILE",
		Short: "Prove a bot to its cell, and keep the token that it gives",
		Long: `Prove a bot to a cell with its key: the cell asks for a signature, for its own address,
of a challenge that is used once. The token is good for five minutes and is kept in a file
that only its owner can read. Each use of it is in the cell's audit (cell bot audit).`,
		Args: cobra.ExactArgs(1),
	}
	f := c.Flags()
	f.StringVar(&p.Base, "base", "", "the cell's public base URL")
	f.StringVar(&p.Address, "address", "", "where the cell is asked, when not there: https, or http on a loopback address")
	f.StringVar(&key, "key-file", "", "file with the bot's private key")
	f.StringVar(&file, "token-file", "", "where the token is kept")
	for _, name := range []string{"base", "key-file", "token-file"} {
		_ = c.MarkFlagRequired(name)
	}
	c.RunE = func(cmd *cobra.Command, args []string) error {
		var err error
		if p.Key, err = os.ReadFile(key); err != nil {
			return usagef("--key-file: %w", err)
		}
		p.Name = args[0]
		token, err := p.Token(cmd.Context())
		if err != nil {
			return err
		}
		return files.Write(file, []byte(token+"\n"), 0o600)
	}
	return c
}

// eachBot gets a token of each cell from a bot of it.
type eachBot struct {
	name, keys string
	addresses  []string
}

func (b *eachBot) add(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&b.name, "bot", "", "bot of every cell whose token the command gets, in CELL_BOT_TOKEN")
	f.StringVar(&b.keys, "bot-keys", "", "folder with the bot's private keys, <cell>.jwk each; read when they are used")
	f.StringArrayVar(&b.addresses, "bot-address", nil, "CELL=URL: where a cell is asked for the token, when not at its CELL_PUBLIC_BASE_URL; may be repeated")
}

func (b *eachBot) check() error {
	if (b.name == "") != (b.keys == "") || b.name == "" && b.addresses != nil {
		return usagef("--bot and --bot-keys go together")
	}
	for _, s := range b.addresses {
		if cell, url, ok := strings.Cut(s, "="); !ok || cells.CellID(cell).Validate() != nil || url == "" {
			return usagef("--bot-address is CELL=URL")
		}
	}
	return nil
}

// token proves the bot to one cell. The key has to be the one that the directory has the
// thumbprint of.
func (b *eachBot) token(ctx context.Context, c *deploy.Cell, env []string) (string, error) {
	key, err := os.ReadFile(filepath.Join(b.keys, string(c.Name)+".jwk"))
	if err != nil {
		return "", err
	}
	_, thumb, err := bot.Public(key)
	if err != nil {
		return "", err
	}
	known := false
	for _, have := range c.Bots {
		if have.Name == b.name {
			if known = true; have.Thumbprint != thumb {
				return "", fmt.Errorf("%w: the key of bot %s is not the one that the directory has for cell %s", cells.ErrInvalid, b.name, c.Name)
			}
		}
	}
	if !known {
		return "", fmt.Errorf("%w: the directory has no bot %s for cell %s; give it to cell prepare or cell attach with --bot", cells.ErrInvalid, b.name, c.Name)
	}
	p := bot.Proof{Name: b.name, Key: key}
	for _, l := range env {
		if v, ok := strings.CutPrefix(l, "CELL_PUBLIC_BASE_URL="); ok {
			p.Base = v
		}
	}
	for _, s := range b.addresses {
		if v, ok := strings.CutPrefix(s, string(c.Name)+"="); ok {
			p.Address = v
		}
	}
	return p.Token(ctx)
}
