// Kubernetes for tests, as one program: its first argument says which part of it runs.
package main

import (
	"context"
	"fmt"
	"os"

	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	kcm "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"

	"github.com/spf13/cobra"
)

func main() {
	parts := map[string]func() *cobra.Command{
		"apiserver":          apiserver.NewAPIServerCommand,
		"controller-manager": kcm.NewControllerManagerCommand,
		"scheduler": func() *cobra.Command { return scheduler.NewSchedulerCommand() },
		"kubelet": func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
	}
	var part func() *cobra.Command
	if len(os.Args) > 1 {
		part = parts[os.Args[1]]
	}
	if part == nil {
		fmt.Fprintln(os.Stderr, "usage: kubesim apiserver|controller-manager|scheduler|kubelet OPTION...")
		os.Exit(2)
	}
	os.Args = append([]string{"kubesim-" + os.Args[1]}, os.Args[2:]...)
	os.Exit(cli.Run(part()))
}
